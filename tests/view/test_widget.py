"""A result in a notebook: the widget, a picture, a line of text, depending on the installed packages."""

import gc
import importlib.util
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from normscope import NormscopeError
from normscope.view.document import pack_document
from normscope.view.html import read_static_file
from normscope.view.widget import VIEW, describe_result_for_widget, mimebundle, widget
from tests.helpers.fakes import NASTY, fake, fake_picture, fake_translation

PNG = b"\x89PNG\r\n\x1a\n"


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("normscope.view.widget.find_spec", lambda name: None if name in names else found(name))


@pytest.mark.parametrize("result", [fake(), fake_translation(), fake_picture(), fake(NASTY)])
def test_a_result_shows_itself(result: Any) -> None:
    data, meta = result._repr_mimebundle_()
    assert set(data) == {VIEW, "image/png", "text/plain"}
    assert data["image/png"].startswith(PNG)
    assert data[VIEW]["model_id"] == widget(result).model_id
    assert isinstance(meta, dict)


def test_the_widget_holds_the_document() -> None:
    analysis = fake(heads=2)
    shown = widget(analysis)
    assert (shown.header, shown.data) == pack_document(analysis)
    assert shown._esm == read_static_file("widget.js")
    assert shown._model_module == "anywidget"
    assert shown.trait_metadata("header", "sync")
    assert shown.trait_metadata("data", "sync")
    assert widget(analysis) is shown
    assert widget(fake()) is not shown


def test_mimebundle_includes_and_excludes() -> None:
    assert set(mimebundle(fake(), include=["image/png"])[0]) == {"image/png"}
    assert set(mimebundle(fake(), exclude=[VIEW])[0]) == {"image/png", "text/plain"}


def test_without_anywidget(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "anywidget")
    assert set(mimebundle(fake())[0]) == {"image/png", "text/plain"}


def test_without_anywidget_and_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "anywidget", "matplotlib")
    assert mimebundle(fake_translation())[0] == {
        "text/plain": "EncoderDecoderAnalysis of some/model: decoder 3 tokens, 6 layers; encoder 2 tokens, 6 layers, "
        "8 scopes, worst completeness error 2.5e-07"
    }


def test_results_that_cannot_be_drawn_are_described_in_words() -> None:
    broken = replace(fake().measured["ATTN-N"], map=torch.full((6, 11, 11), torch.nan))
    data, _ = mimebundle(replace(fake(), measured={"ATTN-N": broken}))
    assert VIEW not in data
    assert data["text/plain"] == describe_result_for_widget(fake()).replace("8 scopes", "1 scope")


def test_a_terminal_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("TerminalInteractiveShell", (), {})()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert set(mimebundle(fake())[0]) == {"text/plain"}


def test_results_are_not_kept_alive() -> None:
    from normscope.view import widget as module

    before = len(module._widgets)
    analysis = fake()
    widget(analysis)
    assert len(module._widgets) == before + 1
    del analysis
    gc.collect()
    assert len(module._widgets) == before


def test_ipython_shows_it() -> None:
    """IPython's own formatter accepts the bundle."""
    formatters = pytest.importorskip("IPython.core.formatters")
    data, _ = formatters.DisplayFormatter().format(fake())
    assert {VIEW, "image/png", "text/plain"} <= set(data)


def test_a_missing_anywidget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from normscope.view import widget as module

    monkeypatch.setitem(sys.modules, "anywidget", None)
    module._widget_class.cache_clear()
    with pytest.raises(NormscopeError, match=r"pip install 'normscope\[notebook\]'"):
        widget(fake())


def test_plain_use_loads_no_widgets() -> None:
    code = (
        "import sys, normscope.cli, normscope.analysis;"
        "print([name for name in ('anywidget', 'fastapi', 'IPython') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert found.stdout.strip() == "[]"
