"""The built viewer: the files of `static/`, which are made from `web/`."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib.resources import files

from normscope.errors import NormscopeError


@lru_cache(maxsize=8)
def read(name: str) -> str:
    """A file of the built viewer."""
    try:
        return (files("normscope.view") / "static" / name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NormscopeError(f"The viewer is not built: {name} is missing. Build it with `make web`.") from error


def has(name: str) -> bool:
    return (files("normscope.view") / "static" / name).is_file()


def inline(script: str) -> str:
    """A script that can stand inside a page: nothing in it looks like its end or like a comment to an HTML parser.

    The replacements are the same characters inside strings, templates and regular expressions, the only places where
    a built script has them.
    """
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def digest(script: str) -> str:
    """What a content security policy calls an inline script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}'"
