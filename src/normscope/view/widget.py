"""A result in a notebook: the viewer as a widget, with a static picture and plain text as fallbacks."""

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
from normscope.view.document import Result, document_title, pack_document, sides_of
from normscope.view.html import has_static_file, read_static_file
from normscope.view.images import image_patch_grid
from normscope.view.scales import worst_completeness

if TYPE_CHECKING:
    from normscope.flow.result import Flow

MISSING = "Widgets need anywidget: pip install 'normscope[notebook]'."
VIEW = "application/vnd.jupyter.widget-view+json"
_widgets: WeakKeyDictionary[Result, Any] = WeakKeyDictionary()  # one widget per result, however often it is shown


def widget(result: Result, flow: Flow | None = None) -> Any:
    """The widget of a result, an `anywidget.AnyWidget`. `flow` is a flow of the same input to a target."""
    if flow is not None:
        described, data = pack_document(result, flow=flow)
        return _widget_class()(header=described, data=data)
    if result not in _widgets:
        described, data = pack_document(result)
        _widgets[result] = _widget_class()(header=described, data=data)
    return _widgets[result]


def mimebundle(
    result: Result, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The MIME bundle of a result: plain text, and the widget and a PNG if their packages are installed."""
    wanted = set(include) if include else None
    unwanted = set(exclude or ())

    def asked(kind: str) -> bool:
        return kind not in unwanted and (wanted is None or kind in wanted)

    data: dict[str, Any] = {"text/plain": describe_result_for_widget(result)}
    meta: dict[str, Any] = {}
    if not _widget_in_terminal():
        with suppress(NormscopeError):  # the plain text remains
            if asked(VIEW) and find_spec("anywidget") is not None and has_static_file("widget.js"):
                data, meta = _add_view(result, data)
        with suppress(NormscopeError):
            if asked("image/png") and find_spec("matplotlib") is not None:
                data["image/png"] = widget_static_png(result)
    return {kind: value for kind, value in data.items() if asked(kind)}, meta


def describe_result_for_widget(result: Result) -> str:
    """One line: the model, the size of the analysis and its worst completeness error."""
    error = max((worst_completeness(one)[0] for one in sides_of(result).values()), key=lambda e: (e != e, e))
    scopes = len(result.scopes)
    count = f"{scopes} scope{'' if scopes == 1 else 's'}"
    return f"{type(result).__name__} of {document_title(result)}, {count}, worst completeness error {error:.1e}"


def widget_static_png(result: Result) -> bytes:
    """A PNG of one map in the last layer: the attention block, or for a picture, [CLS] on the patch grid."""
    one = result.main if isinstance(result, EncoderDecoderAnalysis) else result
    block = one.aliases.get("attention-block", "")
    scope = block if block in one.measured and image_patch_grid(one) is None else one.scopes[-1]
    axes: Any = one.plot(scope, one.layers[-1])
    made: bytes = axes._repr_png_()
    return made


def _widget_in_terminal() -> bool:
    """True if IPython runs in a terminal, which shows text only."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "TerminalInteractiveShell"


def _add_view(result: Result, data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    shown = widget(result)._repr_mimebundle_()
    if shown is None:  # the widget manager displays the widget itself
        return data, {}
    made, meta = shown if isinstance(shown, tuple) else (shown, {})
    return {**made, **data}, dict(meta)


@lru_cache(maxsize=1)
def _widget_class() -> Any:
    """The widget class, created on first use because anywidget is optional."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise NormscopeError(MISSING) from error

    class Viewer(anywidget.AnyWidget):
        """Shows a "normscope-view-1" document: `header`, and `data`, the arrays as one raw deflate stream."""

        _esm = read_static_file("widget.js")
        header = traitlets.Dict().tag(sync=True)
        data = traitlets.Bytes().tag(sync=True)

    return Viewer
