"""A result in a notebook: the viewer as a widget, a static picture where scripts are off, plain text everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.errors import NormscopeError
from normscope.view import bundle
from normscope.view.document import Result, packed, sides_of, title_of
from normscope.view.labels import worst_completeness
from normscope.view.patches import grid_of

if TYPE_CHECKING:
    from normscope.flow.result import Flow

MISSING = "Widgets need anywidget: pip install 'normscope[notebook]'."
VIEW = "application/vnd.jupyter.widget-view+json"
_made: WeakKeyDictionary[Result, Any] = WeakKeyDictionary()  # a result that is shown twice has one widget


def widget(result: Result, flow: Flow | None = None) -> Any:
    """The widget of a result, an `anywidget.AnyWidget`; with a `flow` of the same input to a target, one of its own."""
    if flow is not None:
        described, data = packed(result, flow=flow)
        return _kind()(header=described, data=data)
    if result not in _made:
        described, data = packed(result)
        _made[result] = _kind()(header=described, data=data)
    return _made[result]


def mimebundle(
    result: Result, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a notebook asks a result for: the widget, a PNG and plain text, as far as the parts are installed."""
    wanted = set(include) if include else None
    unwanted = set(exclude or ())

    def asked(kind: str) -> bool:
        return kind not in unwanted and (wanted is None or kind in wanted)

    data: dict[str, Any] = {"text/plain": plain(result)}
    meta: dict[str, Any] = {}
    if not _in_terminal():
        with suppress(NormscopeError):  # what cannot be drawn is still said in words
            if asked(VIEW) and find_spec("anywidget") is not None and bundle.has("widget.js"):
                data, meta = _with_view(result, data)
        with suppress(NormscopeError):
            if asked("image/png") and find_spec("matplotlib") is not None:
                data["image/png"] = static(result)
    return {kind: value for kind, value in data.items() if asked(kind)}, meta


def plain(result: Result) -> str:
    """One line: the model, what was analysed, how exact it is."""
    error = max((worst_completeness(one)[0] for one in sides_of(result).values()), key=lambda e: (e != e, e))
    scopes = len(result.scopes)
    count = f"{scopes} scope{'' if scopes == 1 else 's'}"
    return f"{type(result).__name__} of {title_of(result)}, {count}, worst completeness error {error:.1e}"


def static(result: Result) -> bytes:
    """A PNG of one map: the end of the attention block in the last layer, of a picture [CLS] on its patches."""
    one = result.main if isinstance(result, EncoderDecoderAnalysis) else result
    block = one.aliases.get("attention-block", "")
    scope = block if block in one.measured and grid_of(one) is None else one.scopes[-1]
    axes: Any = one.plot(scope, one.layers[-1])
    made: bytes = axes._repr_png_()
    return made


def _in_terminal() -> bool:
    """Whether IPython runs in a terminal, where nothing but text can be shown."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "TerminalInteractiveShell"


def _with_view(result: Result, data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    shown = widget(result)._repr_mimebundle_()
    if shown is None:  # the widget manager displays by itself
        return data, {}
    made, meta = shown if isinstance(shown, tuple) else (shown, {})
    return {**made, **data}, dict(meta)


@lru_cache(maxsize=1)
def _kind() -> Any:
    """The class of the widgets, made on first use: anywidget is optional."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise NormscopeError(MISSING) from error

    class Viewer(anywidget.AnyWidget):
        """Shows `header`, a "normscope-view-1" document, and `data`, its arrays as one raw deflate stream."""

        _esm = bundle.read("widget.js")
        header = traitlets.Dict().tag(sync=True)
        data = traitlets.Bytes().tag(sync=True)

    return Viewer
