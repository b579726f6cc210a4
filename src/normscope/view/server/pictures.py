"""Decoding of pictures in requests, which are untrusted files."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import Any

from normscope.errors import NormscopeError

PIXELS = 40_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode_server_picture(text: str) -> Any:
    """The RGB Pillow image of a base64-encoded file or `data:` URL."""
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
            warnings.simplefilter("error")  # Pillow warns of suspicious sizes
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                width, height = picture.size  # known before anything is decompressed
                if width * height > PIXELS:
                    raise NormscopeError(
                        f"The picture has {width} x {height} pixels; at most {PIXELS // 10**6} million are accepted."
                    )
                return picture.convert("RGB")
    except NormscopeError:
        raise
    except Exception as error:  # Pillow raises many types for damaged files
        kinds = ", ".join(FORMATS)
        raise NormscopeError(
            f"The picture cannot be read. Send a complete file in one of these formats: {kinds}."
        ) from error
