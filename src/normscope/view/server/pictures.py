"""Pictures that come with a request: read with care, since anybody's file may be inside."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import Any

from normscope.errors import NormscopeError

PIXELS = 40_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decoded(text: str) -> Any:
    """The picture (RGB, as Pillow has it) of a file in base64, with or without the `data:` address in front."""
    try:
        from PIL import Image
    except ImportError as error:
        raise NormscopeError("Reading pictures needs Pillow: pip install 'normscope[vision]'.") from error
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NormscopeError("The picture is not base64.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of sizes that it finds suspicious
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                width, height = picture.size  # known before anything is unpacked
                if width * height > PIXELS:
                    raise NormscopeError(
                        f"The picture has {width} x {height} pixels; up to {PIXELS // 10**6} million are taken."
                    )
                return picture.convert("RGB")
    except NormscopeError:
        raise
    except Exception as error:  # readers of damaged files raise what they like
        kinds = ", ".join(FORMATS)
        raise NormscopeError(f"The picture cannot be read. It must be a whole file of one of: {kinds}.") from error
