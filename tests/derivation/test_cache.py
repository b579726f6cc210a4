"""Descriptions that are kept: used for the same model only, and never without a proof."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from normscope import Analyzer, derive
from normscope.derivation import family
from normscope.derivation.cache import cache_folder, forget_descriptions
from normscope.models.description import family_from_json
from normscope.models.spec import Family
from tests.helpers.odd_models import Shape, odd_model

pytestmark = pytest.mark.filterwarnings("ignore:normscope has no family")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which does not exist yet."""
    monkeypatch.setenv("NORMSCOPE_CACHE", str(tmp_path / "kept"))
    forget_descriptions()
    return tmp_path / "kept" / "derived"


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    """The models that are watched from now on."""
    models: list[PreTrainedModel] = []
    watch: Callable[[PreTrainedModel], Family] = family._watch_model

    def note(model: PreTrainedModel) -> Family:
        models.append(model)
        return watch(model)

    monkeypatch.setattr(family, "_watch_model", note)
    return models


def test_a_model_is_watched_once(folder: Path, watched: list[PreTrainedModel]) -> None:
    first = derive(odd_model(Shape()))
    assert derive(odd_model(Shape())) == first  # in this process
    (path,) = folder.iterdir()
    assert family_from_json(path) == first
    forget_descriptions()
    assert derive(odd_model(Shape())) == first  # from the file
    assert len(watched) == 1


def test_another_config_is_another_model(folder: Path, watched: list[PreTrainedModel]) -> None:
    """The shape is in the config; the same modules with another scale."""
    assert derive(odd_model(Shape(scale=0.5))) != derive(odd_model(Shape(scale=0.25)))
    assert len(watched) == len(list(folder.iterdir())) == 2


def test_a_plain_attribute_counts(watched: list[PreTrainedModel]) -> None:
    """A number that is in no config, such as an epsilon that somebody changed."""
    changed = odd_model(Shape())
    changed.steps[0].factor = 2.0
    derive(odd_model(Shape()))
    derive(changed)
    assert len(watched) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"type": "Norm", "path": "x"}', '{"type": "Family", "nam": 1}', "\0"])
def test_a_damaged_file_is_ignored(folder: Path, watched: list[PreTrainedModel], damage: str) -> None:
    expected = derive(odd_model(Shape()))
    (path,) = folder.iterdir()
    path.write_text(damage)
    forget_descriptions()
    assert derive(odd_model(Shape())) == expected
    assert family_from_json(path) == expected  # written again
    assert len(watched) == 2


def test_a_wrong_file_is_found_out(folder: Path) -> None:
    """By the proof; the model is then described anew."""
    expected = derive(odd_model(Shape(packed="")))
    (path,) = folder.iterdir()
    path.write_text(path.read_text().replace("mix.carry", "mix.tell"))
    forget_descriptions()
    assert Analyzer(odd_model(Shape(packed=""))).family == expected


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORMSCOPE_CACHE", str(tmp_path / "file" / "below"))
    assert derive(odd_model(Shape())).derived


def test_where_descriptions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMSCOPE_CACHE", "")
    assert cache_folder() is None
    monkeypatch.delenv("NORMSCOPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "normscope" / "derived"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "normscope" / "derived"
