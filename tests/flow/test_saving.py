"""Flows as files, pages and figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from normscope import Flow, NormscopeError
from normscope.saving import tensor_checksum
from tests.helpers.toys import speaker, toy_lens, translator

KINDS: dict[str, Any] = {
    "map": lambda: speaker().flow("the cat sat"),
    "logit": lambda: speaker().flow("the cat sat", target="top"),
    "difference": lambda: speaker().flow("the cat sat", target=("cat", "mat")),
    "each": lambda: speaker().flow("the cat sat", target=slice(1, 3), each=True, sources="word"),
    "continuations": lambda: speaker().flow("the cat", target=("on a mat", "the dog"), log_prob=True, sources="word"),
    "rollout": lambda: toy_lens().flow("the cat sat", method="rollout"),
    "no maps": lambda: speaker().flow("the cat sat", target="top", method="gradient_x_input"),
    "no remainder": lambda: speaker().flow("the cat sat", target="top", method="rollout"),
    "two sides": lambda: translator().flow(("the cat sat", "le chat"), target="sur"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    flow: Flow = KINDS[kind]()
    again = Flow.load(flow.save(tmp_path / "flow.safetensors"))
    for name in ("method", "rows", "columns", "layers", "tokens", "warnings", "has_maps"):
        assert getattr(again, name) == getattr(flow, name), name
    assert repr(again) == repr(flow)
    assert again.info["model"] == flow.info["model"]
    if flow.has_maps:
        assert torch.equal(again.maps, flow.maps)
        assert (again.completeness is None) == (flow.completeness is None)
    else:
        with pytest.raises(NormscopeError, match="no maps"):
            again.maps  # noqa: B018
    assert (again.to is None) == (flow.to is None)
    assert again.sources == flow.sources
    assert (again.each is None) == (flow.each is None)
    if flow.each is not None and again.each is not None:
        assert again.each.targets == flow.each.targets
        assert all(torch.equal(getattr(again, name), getattr(flow, name)) for name in ("scores", "value", "remainder"))
    if flow.to is not None and again.to is not None:
        assert torch.equal(again.scores, flow.scores)
        assert (again.to.target, again.to.value, again.to.contrast) == (flow.to.target, flow.to.value, flow.to.contrast)
        assert again.to.remainder == flow.to.remainder or math.isnan(flow.to.remainder)
        assert again.to.layers.keys() == flow.to.layers.keys()
        assert all(torch.equal(again.to.layers[side], table) for side, table in flow.to.layers.items())
        assert all(torch.equal(again.to.remainders[side], table) for side, table in flow.to.remainders.items())
    Flow.load(again.save(tmp_path / "again.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_flow_in_html_text_and_plot(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flow: Flow = KINDS[kind]()
    page = flow.to_html(tmp_path / "flow.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert all(f">{token}<" in page for token in ("the", "cat"))
    shown = flow._repr_mimebundle_()
    assert shown["text/plain"] == repr(flow)
    assert shown["text/html"] in page
    assert set(flow._repr_mimebundle_(include=["text/plain"])) == {"text/plain"}
    assert set(flow._repr_mimebundle_(exclude=["text/html"])) == {"text/plain"}
    axes = flow.plot()
    assert axes in axes.figure.axes
    assert axes._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["map", "logit"])
def test_plotting_into_given_axes(kind: str) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    left, right = figure.subplots(1, 2)
    assert KINDS[kind]().plot(ax=right) is right
    assert right.get_title()
    assert not left.get_title()


def test_text_is_escaped(tmp_path: Path) -> None:
    flow: Flow = KINDS["logit"]()
    nasty = "</p><script>alert(1)</script>"
    columns = tuple(label._replace(token=nasty) for label in flow.columns)
    changed = Flow(flow.method, flow.rows, columns, flow.layers, flow.to, {"model": nasty})
    page = changed.to_html(tmp_path / "x.html").read_text(encoding="utf-8")
    assert "<script" not in page


def rewritten(path: Path, change: Any, whole: bool = True) -> Path:
    """The file with a change; `whole`: with a matching checksum."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors, meta = load_file(path), json.loads(metadata["normscope"])
    change(tensors, meta)
    metadata["normscope"] = json.dumps(meta)
    if whole:
        metadata["sha256"] = tensor_checksum(tensors, metadata["normscope"])
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    ("change", "whole", "reason"),
    [
        (lambda tensors, meta: tensors["scores"].add_(1), False, "damaged.*checksum"),
        (lambda tensors, meta: meta.update(method="other"), False, "damaged.*checksum"),
        (lambda tensors, meta: meta.pop("rows"), True, "lacks a part of a flow"),
        (lambda tensors, meta: meta["to"].pop("value"), True, "lacks a part of a flow"),
        (lambda tensors, meta: tensors.pop("scores"), True, "lacks a part of a flow"),
        (lambda tensors, meta: meta["columns"].pop(), True, "labels do not fit"),
        (lambda tensors, meta: meta["layers"].pop(), True, "labels do not fit"),
        (lambda tensors, meta: meta.update(format="other"), True, r"not written by Flow\.save"),
        (lambda tensors, meta: meta.pop("format"), True, r"not written by Flow\.save"),
    ],
)
def test_damage_is_refused(change: Any, whole: bool, reason: str, tmp_path: Path) -> None:
    path = KINDS["logit"]().save(tmp_path / "flow.safetensors")
    with pytest.raises(NormscopeError, match=reason):
        Flow.load(rewritten(path, change, whole))


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = toy_lens().analyze("the cat").save(tmp_path / "analysis.safetensors")
    with pytest.raises(NormscopeError, match=r"not written by Flow\.save"):
        Flow.load(other)
    flow = KINDS["logit"]()
    with pytest.raises(NormscopeError, match=r"not written by Analysis\.save"):
        type(toy_lens().analyze("the cat")).load(flow.save(tmp_path / "flow.safetensors"))
    with pytest.raises(NormscopeError, match="does not exist"):
        Flow.load(tmp_path / "nothing.safetensors")
    with pytest.raises(NormscopeError, match=r"must end in \.safetensors"):
        flow.save(tmp_path / "flow.pt")
    with pytest.raises(NormscopeError, match=r"must end in \.html"):
        flow.to_html(tmp_path / "flow.pdf")
    half = tmp_path / "flow.safetensors"
    half.write_bytes(half.read_bytes()[:-7])
    with pytest.raises(NormscopeError, match="not a valid safetensors file"):
        Flow.load(half)
