"""The figures of docs/figures are those that their script draws, and pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.make_figures import DRAWINGS, FOLDER, main
from normscope import NormscopeError, default_model
from tests.docs.pages import pages

BY_HAND = {"architecture"}


def test_every_figure_is_drawn_by_the_script_and_shown() -> None:
    kept = {path.stem for path in FOLDER.glob("*.svg")}
    assert kept == set(DRAWINGS) | BY_HAND
    shown = {name for page in pages() for name in re.findall(r"figures/([\w-]+)\.svg", page.read_text("utf-8"))}
    assert kept <= shown


@pytest.mark.slow
def test_the_script_draws_them(tmp_path: Path) -> None:
    try:
        default_model.default_model_folder()
    except NormscopeError:
        pytest.skip("the default model is not installed")
    main(tmp_path)
    for name in DRAWINGS:
        drawn, kept = ((folder / f"{name}.svg").read_text("utf-8") for folder in (tmp_path, FOLDER))
        assert drawn.startswith("<?xml")
        assert abs(len(drawn) - len(kept)) < 0.1 * len(kept), f"{name}.svg is not current: run `make figures`"
