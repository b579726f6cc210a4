"""Files: their contents, and requests that are refused before anything is computed."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.view.export import analysis_to_export_dict, export
from normscope.view.formats import ANALYSIS_SUFFIXES, check_output_path
from tests.helpers.fakes import NASTY, fake, fake_translation
from tests.helpers.kinds import result_of
from tests.helpers.toys import SCOPES


@pytest.mark.parametrize("suffix", [*ANALYSIS_SUFFIXES, ".PNG", ".Html"])
def test_every_suffix(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    check_output_path(path)
    assert export(fake(NASTY, layers=(0, 1), heads=2), path) == path
    assert path.stat().st_size > 500
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_json_says_everything(tmp_path: Path) -> None:
    analysis = fake(NASTY, layers=(1, 4), heads=3, source=("the", "cat"), rows=[0, 3])
    content = json.loads(export(analysis, tmp_path / "x.json").read_bytes())
    assert content["format"] == "normscope-json-1"
    assert content["layers"] == [1, 4]
    assert content["info"] == analysis.info
    assert content["rows"] == [{"token": NASTY[k], "side": "decoder", "position": k} for k in (0, 3)]
    assert content["columns"][-1] == {"token": "cat", "side": "encoder", "position": 1}
    assert list(content["scopes"]) == list(SCOPES)
    for scope in SCOPES:
        for name, tensor in vars(analysis.measured[scope]).items():
            assert torch.equal(torch.tensor(content["scopes"][scope][name]), tensor)
    assert content["heads"]["indices"] == [0, 1, 2]
    assert torch.equal(torch.tensor(content["heads"]["maps"]["ATTN-N"]), analysis.heads["ATTN-N"])
    assert torch.equal(torch.tensor(content["heads"]["value_norms"]), analysis.value_norms)


def test_json_is_readable_and_strict(tmp_path: Path) -> None:
    analysis = fake(
        ("漢字", "b"), layers=(0,), scopes=("ATTN-N",), info={"a": math.nan, "b": Path("x"), "c": (1, None)}
    )
    broken = replace(analysis.measured["ATTN-N"], map=torch.tensor([[[math.nan, 0.1], [math.inf, 1.0]]]))
    text = export(replace(analysis, measured={"ATTN-N": broken}), tmp_path / "x.json").read_text(encoding="utf-8")
    assert "漢字" in text
    assert '"map":[[[null,0.100000001],[null,1.0]]]' in text
    assert json.loads(text)["info"] == {"a": None, "b": "x", "c": [1, None]}
    assert "NaN" not in text
    assert "heads" not in json.loads(text)


def test_json_of_float64_is_exact(tmp_path: Path) -> None:
    analysis = fake(dtype=torch.float64)
    content = json.loads(export(analysis, tmp_path / "x.json").read_bytes())
    assert torch.equal(torch.tensor(content["scopes"]["ATTN-N"]["map"], dtype=torch.float64), analysis["ATTN-N"])


def test_npz_needs_no_pickle(tmp_path: Path) -> None:
    analysis = fake(layers=(0, 5), heads=2)
    with np.load(export(analysis, tmp_path / "x.npz"), allow_pickle=False) as arrays:
        for scope in SCOPES:
            assert np.array_equal(arrays[f"map/{scope}"], analysis[scope].numpy())
            assert np.array_equal(arrays[f"mixing/{scope}"], analysis.mixing_ratio(scope).numpy())
            assert np.array_equal(arrays[f"remainder/{scope}"], analysis.remainder(scope).numpy())
            assert np.array_equal(arrays[f"completeness/{scope}"], analysis.completeness[scope].numpy())
        assert np.array_equal(arrays["heads/ATTN-W"], analysis.heads["ATTN-W"].numpy())
        assert arrays["value_norms"].shape == (2, 2, 11)
        assert arrays["tokens"].tolist() == arrays["column_tokens"].tolist() == list(analysis.tokens)
        assert arrays["row_sides"].tolist() == ["encoder"] * 11
        assert arrays["column_positions"].tolist() == list(range(11))
        assert arrays["scopes"].tolist() == list(SCOPES)
        assert arrays["layers"].tolist() == [0, 5]
        assert arrays["head_indices"].tolist() == [0, 1]
        assert json.loads(str(arrays["info"])) == analysis.info
        assert all(array.dtype != object for array in arrays.values())


def test_safetensors_round_trip(tmp_path: Path) -> None:
    analysis = fake()
    loaded = Analysis.load(export(analysis, tmp_path / "x.safetensors"))
    assert loaded.rows == analysis.rows
    assert torch.equal(loaded["ATTN-N"], analysis["ATTN-N"])


def test_scope_and_layer_choose_the_figure(tmp_path: Path) -> None:
    one = export(fake(), tmp_path / "one.svg", "ATTN-N", 2).read_text()
    every = export(fake(), tmp_path / "every.svg").read_text()
    assert "ATTN-N, layer 3" in one
    assert "layer 6" not in one
    assert "layer 6" in every


def test_bad_paths_are_refused_up_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = r"\.html, \.svg, \.pdf, \.png, \.json, \.npz, \.safetensors"
    for name in ("x.gif", "x", "x.json.gz", ".png"):
        with pytest.raises(NormscopeError, match=known):
            check_output_path(tmp_path / name)
    with pytest.raises(NormscopeError, match="does not exist"):
        check_output_path(tmp_path / "missing" / "x.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(NormscopeError, match="it is a folder"):
        check_output_path(tmp_path / "folder.png")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NormscopeError, match="not writable"):
        check_output_path(tmp_path / "x.png")


def test_a_figure_without_matplotlib_is_refused_up_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NormscopeError, match=r"normscope\[plot\]"):
        check_output_path(tmp_path / "x.svg")
    check_output_path(tmp_path / "x.html")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(NormscopeError, match="No space left on device"):
        export(fake(), path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_both_sides_in_every_format(tmp_path: Path) -> None:
    result = fake_translation(heads=2)
    for suffix in ANALYSIS_SUFFIXES:
        assert export(result, tmp_path / f"x{suffix}").stat().st_size
    content = json.loads((tmp_path / "x.json").read_bytes())
    assert content["sides"] == {side: analysis_to_export_dict(one) for side, one in result.sides.items()}
    assert content["info"]["model"] == "some/model"
    with np.load(tmp_path / "x.npz") as arrays:
        assert {name.split("/")[0] for name in arrays.files} == {"encoder", "decoder"}
        assert list(arrays["decoder/column_tokens"]) == ["le", "chat", "dort", "the", "cat"]
    loaded = Analysis.load(tmp_path / "x.safetensors")
    assert torch.equal(loaded["ATTN-N"], result["ATTN-N"])


def test_cross_attention_has_no_mixing_ratio_in_any_file(tmp_path: Path) -> None:
    """It reads the encoder's tokens only: the number would always be 1."""
    result = result_of("encoder-decoder")
    for suffix in (".json", ".npz", ".safetensors"):
        export(result, tmp_path / f"x{suffix}")
    scopes = json.loads((tmp_path / "x.json").read_bytes())["sides"]["decoder"]["scopes"]
    with np.load(tmp_path / "x.npz") as arrays:
        names = (set(arrays.files), set(load_file(tmp_path / "x.safetensors")))
    for scope, parts in scopes.items():
        mixes = not scope.startswith("XATTN")
        assert ("mixing" in parts) == mixes
        assert "remainder" in parts
        for kept in names:
            assert (f"decoder/mixing/{scope}" in kept) == mixes
            assert f"decoder/map/{scope}" in kept
