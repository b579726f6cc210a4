"""Show trailing comments of fields in the API reference: `map: Tensor  # (layers, rows, columns)`."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


class TrailingComments(griffe.Extension):
    """Use the comments on the lines of a field or constant as its docstring if it has none."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and attr.lineno is not None and (text := comment_of(attr)):
            attr.docstring = griffe.Docstring(text, lineno=attr.lineno, parent=attr)


def comment_of(attr: griffe.Attribute) -> str:
    """The trailing comment of an attribute, or an empty string."""
    if isinstance(attr.filepath, list) or attr.lineno is None or attr.endlineno is None:
        return ""
    lines = attr.lines_collection[attr.filepath]
    found = [_comment(line) for line in lines[attr.lineno - 1 : attr.endlineno]]
    return " ".join(part for part in found if part)


def _comment(line: str) -> str:
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip()).readline):
            if token.type == tokenize.COMMENT:
                return token.string.lstrip("#: ").partition("type: ignore")[0].strip()
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass
    return ""
