"""Analysing a sentence involves few files, so that newcomers can follow the code."""

from __future__ import annotations

import pytest

from normscope import Analyzer, NormscopeError, default_model
from tests.helpers.call_path import calls, crossed_files

MOST = 14  # files


@pytest.mark.parametrize("name", ["analyze", "flow"])
def test_the_way_of_a_sentence_is_short(name: str) -> None:
    try:
        folder = default_model.find()
    except NormscopeError:
        pytest.skip("the default model is not installed")
    files = crossed_files(calls(Analyzer.from_pretrained(folder))[name])
    assert files[0] == "analyzer.py"
    assert len(files) <= MOST, files
