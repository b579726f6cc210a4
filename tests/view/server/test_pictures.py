"""Pictures in requests: whole files of known formats, and not too large."""

import base64
import io
import struct
import zlib

import pytest
from PIL import Image

from normscope import NormscopeError
from normscope.view.server.pictures import FORMATS, PIXELS, decode_server_picture
from tests.helpers.kinds import png


def encoded(kind: str, mode: str = "RGB") -> str:
    file = io.BytesIO()
    Image.new(mode, (8, 6), 1).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind: str) -> None:
    found = decode_server_picture(encoded(kind))
    assert found.size == (8, 6)
    assert found.mode == "RGB"


def test_data_addresses() -> None:
    assert decode_server_picture(f"data:image/png;base64,{png()}").size == (30, 20)


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "EPS", "PDF"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(NormscopeError, match="cannot be read"):
        decode_server_picture(encoded(kind))


@pytest.mark.parametrize("text", ["", "###", "aGVsbG8", png()[:100], "data:image/png;base64,", "é"])
def test_damaged_files_are_refused(text: str) -> None:
    with pytest.raises(NormscopeError, match="picture"):
        decode_server_picture(text)


@pytest.mark.parametrize("width", [100_000, 2**30, 9_000])
def test_bombs_are_refused_before_they_are_unpacked(width: int) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, 9_000, 8, 2, 0, 0, 0))
    file += chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
    assert width * 9_000 > PIXELS
    with pytest.raises(NormscopeError, match="picture"):
        decode_server_picture(base64.b64encode(file).decode())
