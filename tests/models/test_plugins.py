"""Families and measures of other packages, by their entry points."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normscope import NormscopeWarning, default_model
from normscope.cli import app
from normscope.corpus import measure_registry
from normscope.models import registry
from normscope.models.encoders import BERT
from tests.helpers.tiny import tiny

CODE = """
from dataclasses import replace

from normscope import register_measure
from normscope.models.encoders import BERT

MINE = replace(BERT, name="Mine", model_types=("mine",))
WRONG = "no family"


@register_measure("installed_count", scopes=["weights"])
def installed_count(analysis):
    \"\"\"layer -> the number of tokens\"\"\"
    return {"layer": list(analysis.layers), "tokens": [len(analysis.columns)] * len(analysis.layers)}


def plain(analysis):
    return {}
"""


def install(folder: Path, families: str = "", measures: str = "") -> Path:
    """A package with these entry points, as pip installs it."""
    (folder / "others_package.py").write_text(CODE)
    info = folder / "others_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[normscope.families]\n{families}\n[normscope.measures]\n{measures}\n")
    return folder


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    measure_registry.find_registered_measures(
        ["flow"]
    )  # loads our own: one first loaded by a test would be forgotten after it
    monkeypatch.setattr(measure_registry, "_measures", dict(measure_registry._measures))
    registry._plugin_families.cache_clear()
    measure_registry._fill_measure_registry.cache_clear()
    yield
    sys.modules.pop("others_package", None)
    registry._plugin_families.cache_clear()
    measure_registry._fill_measure_registry.cache_clear()


def test_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, families="mine = others_package:MINE"))
    names = [family.name for family in registry.families()]
    assert names.count("Mine") == 1
    assert names.index("Mine") < names.index("BERT")
    monkeypatch.setattr(registry, "_registered", [])
    registry.register_family(replace(BERT, name="Mine"))
    assert registry.families()[0].name == "Mine"  # what a process registers comes first
    assert registry.family_of(tiny("bert")).name == "Mine"


def test_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, measures="count = others_package:installed_count"))
    assert measure_registry.find_registered_measures(["installed_count"])[0].scopes == ("weights",)
    assert measure_registry.describe_measures()["installed_count"] == "layer -> the number of tokens"
    listed = CliRunner().invoke(app, ["corpus", "--measures", "list"]).output
    assert re.search(r"^installed_count +layer -> the number of tokens$", listed, re.MULTILINE)


@pytest.mark.parametrize(
    ("families", "measures", "reason"),
    [
        ("mine = others_package:WRONG", "", "Expected a normscope.models.spec.Family, not str"),
        ("mine = others_package:NOTHING", "", "NOTHING"),
        ("mine = no_such_package:MINE", "", "no_such_package"),
        ("", "plain = others_package:plain", "not decorated with normscope.register_measure"),
        ("", "plain = others_package:NOTHING", "NOTHING"),
    ],
)
def test_a_broken_one_is_reported_once(
    families: str, measures: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, families, measures))
    ask = registry.families if families else measure_registry.describe_measures
    with pytest.warns(NormscopeWarning, match=rf"The package others-package .*{reason}") as told:
        assert ask()
    assert len(told) == 1
    assert ask()  # without a warning, which would be an error here


def test_plugins_reach_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polars")
    monkeypatch.syspath_prepend(install(tmp_path, "mine = others_package:MINE", "x = others_package:installed_count"))
    (tmp_path / "data.txt").write_text("A text.\nAnother one.\n")
    path = ":".join([str(tmp_path), *(entry for entry in sys.path if entry)])
    command = [sys.executable, "-m", "normscope", "corpus", str(tmp_path / "data.txt"), "--model"]
    command += [str(default_model.find()), "-o", str(tmp_path / "run"), "--measures", "installed_count"]
    done = subprocess.run(command, env={"PYTHONPATH": path, "PATH": "", "HOME": str(tmp_path)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    from normscope import corpus

    run = corpus.open(tmp_path / "run")
    assert run.scan("installed_count").collect()["tokens"].to_list() == [5] * 6 + [5] * 6
    assert repr(run).startswith(f"Run({str(tmp_path / 'run')!r}, model=")
    assert "2 of 2 entries, tables: installed_count, items)" in repr(run)
