"""Two files of sentences, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from normscope import NormscopeError
from normscope.corpus import read
from tests.helpers.files import bad, good, write


def test_lines_belong_together(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffa b\r\nc\n", "x.en")
    first, second = read(path, "parallel", target=write(tmp_path, "d\ne  f\n", "x.fr"))
    assert (good(first).id, good(first).text, good(first).target) == ("x.en:1", "a b", "d")
    assert (good(second).text, good(second).target) == ("c", "e  f")


def test_empty_and_damaged_lines_keep_their_place(tmp_path: Path) -> None:
    path = write(tmp_path, b"a\n\nb\n\xff\n", "x.en")
    target = write(tmp_path, "c\nd\n\nx\n", "x.fr")
    first, second, third, fourth = read(path, "parallel", target=str(target))
    assert good(first).target == "c"
    assert bad(second).reason == "The text is empty."
    assert bad(third).reason == "The target text is empty."
    assert (bad(fourth).where, bad(fourth).id) == (f"{path}:4", "x.en:4")


def test_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a\nb\n", "x.en")
    with pytest.raises(NormscopeError, match="needs the file with the translations"):
        read(path, "parallel")
    with pytest.raises(NormscopeError, match="more lines"):
        list(read(path, "parallel", target=write(tmp_path, "c\n", "x.fr")))
    with pytest.raises(NormscopeError, match=r"Cannot read .*none\.fr"):
        read(path, "parallel", target=tmp_path / "none.fr")
