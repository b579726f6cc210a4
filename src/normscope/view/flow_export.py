"""A flow as JSON: `format`, `info`, `method`, `layers`, `rows` and `columns` (lists of `{token, side, position}`).

With a target `to`, which holds `target`, `contrast` (whether it is the difference of two logits), `value`, `scores`,
`remainder`, `completeness`, and by side `layers` and `remainders`; without one `maps` (layers x rows x columns).
Numbers that are not finite are null.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normscope.flow.result import Flow
from normscope.view import export

FORMAT = "normscope-flow-1"


def as_dict(flow: Flow) -> dict[str, Any]:
    """The flow as plain lists, numbers and strings."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "info": export.plain(dict(flow.info)),
        "method": flow.method,
        "layers": list(flow.layers),
        "rows": [label._asdict() for label in flow.rows],
        "columns": [label._asdict() for label in flow.columns],
    }
    content |= {"maps": export.plain(flow.maps)} if flow.to is None else {"to": export.plain(vars(flow.to))}
    return content


def write_json(flow: Flow, target: Path) -> Path:
    """Write the flow to a file."""
    return export.write_json(as_dict(flow), target)
