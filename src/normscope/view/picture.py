"""Pictures for a viewer: small enough to travel inside a document."""

from __future__ import annotations

import base64
import io
from typing import Any

from normscope.errors import NormscopeError
from normscope.view.patches import pixels_of

LONGEST = 512  # pixels of the longer side


def data_address(image: Any) -> str:
    """A picture (a path, a PIL image or an array) as the address of a PNG that holds its data."""
    try:
        from PIL import Image
    except ImportError as error:
        raise NormscopeError("Showing pictures needs Pillow: pip install 'normscope[vision]'.") from error
    pixels = pixels_of(image)
    if pixels.dtype.kind == "f":  # shades from 0 to 1
        pixels = (255 * pixels).round().astype("uint8")
    picture = Image.fromarray(pixels).convert("RGB")
    picture.thumbnail((LONGEST, LONGEST))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
