"""Families with recurrences against the oracle without descriptions, and what their maps mean."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normscope import Analysis, Analyzer, NormscopeError
from normscope.engine.request import Options, requests_for
from normscope.engine.run import Workspace, run_batch
from normscope.inputs.encode import encode
from normscope.inputs.item import Sources
from normscope.measures.first_token import first_token_share
from normscope.models.modules import layer_blocks
from normscope.models.spec import Attention
from normscope.tracing.uniform_attention import run_uniform_attention
from normscope.view.document import document_map_bytes, pack_document
from tests.helpers.free_oracle import FreeLayer, Shares, free_oracle
from tests.helpers.free_recurrences import RECURRENCES
from tests.helpers.tiny import HYBRIDS, inputs, tiny

MIXERS = ("linear_attn", "self_attn", "mixer", "mamba", "conv")
OUTPUTS = tuple(f"{mixer}.{name}" for mixer in MIXERS for name in ("out_proj", "o_proj"))
TOLERANCE = 1e-6  # transformers computes recurrences and norms in float32


@cache
def lens_of(name: str) -> Analyzer:
    return Analyzer(tiny(name))


@cache
def case(name: str, length: int = 7) -> tuple[Analysis, list[FreeLayer]]:
    encoding = inputs(name, lens_of(name).model, length)
    (layers,) = free_oracle(lens_of(name).model, encoding, linear_gates=name.startswith("lfm2")).values()
    result = lens_of(name).analyze(encoding)
    assert isinstance(result, Analysis)
    return result, layers


def norms(shares: Shares, item: int = 0) -> Tensor:
    """(n, columns)"""
    parts = shares.parts[:, item] if shares.parts.dim() == 4 else shares.parts
    return parts.transpose(0, 1).norm(dim=-1)


def sum_of(one: Shares, other: Shares) -> Shares:
    return Shares(one.parts + other.parts, one.rest + other.rest, one.actual + other.actual)


def assert_cells_equal(found: Tensor, expected: Tensor) -> None:
    """Relative to the largest cell of the row: weights that cancel lose digits of float32."""
    error = (found - expected).abs() / expected.amax(-1, keepdim=True)
    assert float(error.max()) < TOLERANCE, float(error.max())


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("name", HYBRIDS)
def test_layer_output(name: str, length: int) -> None:
    result, layers = case(name, length)
    assert result.layers == tuple(range(len(layers)))
    for n, layer in enumerate(layers):
        assert_cells_equal(result["layer"][n], norms(layer.output))
        rest = layer.output.rest[0].norm(dim=-1)
        torch.testing.assert_close(result.remainder("layer")[n], rest, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", HYBRIDS)
def test_token_mixing(name: str) -> None:
    """After the output projection of recurrences and of attentions alike."""
    result, layers = case(name)
    for n, layer in enumerate(layers):
        (shares,) = (layer.modules[path][0] for path in OUTPUTS if path in layer.modules)
        assert_cells_equal(result["attention"][n], norms(shares))


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_scope(name: str) -> None:
    """Every scope's map is that of something that enters or leaves a module of the layer."""
    result, layers = case(name)
    for n, layer in enumerate(layers):
        kept = [shares for some in (layer.modules, layer.inputs) for one in some.values() for shares in one]
        if "block_sparse_moe" in layer.modules:  # Granite adds the shared expert in the layer's own code
            kept.append(sum_of(layer.modules["block_sparse_moe"][0], layer.modules["shared_mlp"][0]))
        seen = [one for one in map(norms, kept) if one.shape == result["layer"][n].shape]
        for scope in result.scopes:
            cells = result[scope][n]
            if scope.endswith("-N"):
                largest = cells.amax(-1, keepdim=True)
                assert min(float(((one - cells).abs() / largest).max()) for one in seen) < TOLERANCE, (scope, n)


@contextmanager
def watched_recurrences(model: PreTrainedModel) -> Iterator[list[Callable[[Tensor], Tensor]]]:
    """The recurrences that the model runs, as functions of the values, in order."""
    found: list[Callable[[Tensor], Tensor]] = []
    files = {sys.modules[type(module).__module__] for module in model.modules()}

    def watch(function: Any, recurrence: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            found.append(recurrence(dict(bound.arguments)))
            return function(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name, (_, recurrence) in RECURRENCES.items():
            for file in files:
                if hasattr(file, name):
                    patches.enter_context(patch.object(file, name, watch(getattr(file, name), recurrence)))
        yield found


@pytest.mark.parametrize("length", [2, 70])
@pytest.mark.parametrize("name", HYBRIDS)
def test_weights_by_probing(name: str, length: int) -> None:
    """MIX-W is the mean over heads of what the recurrence makes of a value that only one token has."""
    lens = lens_of(name)
    encoding = inputs(name, lens.model, length)
    with watched_recurrences(lens.model) as recurrences, torch.no_grad():
        lens.model(**encoding)
    result = lens.analyze(encoding, scopes=["weights", "attention"])
    eye = torch.eye(length, dtype=torch.float64)[None, :, None]  # (1, n, 1, n)
    for n, layer in enumerate(n for n, one in enumerate(layer_kinds(name)) if one == "MIX"):
        heads = lens.loaded.calls.heads["decoder"][layer]
        if name.startswith("lfm2"):
            with torch.no_grad():
                weights = (
                    lens.model.layers[layer].conv.conv(eye[0].expand(length, 24, length))[..., :length].mean(1).t()
                )
        else:
            weights = recurrences[n](eye.expand(1, length, heads, length)).mean(2)[0]
        torch.testing.assert_close(result["MIX-W"][layer], weights, rtol=1e-6, atol=1e-6)
        assert length == 2 or float(result["MIX-W"][layer].min()) < 0
        own = weights.diagonal()
        others = weights.abs().sum(-1) - own.abs()
        torch.testing.assert_close(
            result.mixing_ratio("MIX-W")[layer], others / (others + own.abs()), rtol=1e-5, atol=1e-5
        )
        share = weights[:, 0].abs() / weights.abs().sum(-1)
        torch.testing.assert_close(first_token_share(result["MIX-W"])[layer], share, rtol=1e-5, atol=1e-5)
    assert max(float(one.max()) for one in result.completeness.values()) < 2e-5


def layer_kinds(name: str) -> list[str]:
    """MIX for the layers with a recurrence, ATTN for the others."""
    blocks = [layer_blocks(layer, lens_of(name).family.stacks[0]) for layer in lens_of(name).model.layers]
    ops = [next(b.op for b in one[0].branches if isinstance(b.op, Attention)) for one in blocks]
    return ["ATTN" if op.recurrence is None else "MIX" for op in ops]


@pytest.mark.parametrize("name", HYBRIDS)
def test_padded_on_either_side(name: str) -> None:
    lens = lens_of(name)
    long, short = (inputs(name, lens.model, n, seed=n)["input_ids"][0] for n in (9, 5))
    alone = [lens.analyze({"input_ids": one}) for one in (long, short)]
    for left in (False, True):
        pad = torch.zeros(4, dtype=torch.long)
        ids = torch.stack([long, torch.cat([pad, short] if left else [short, pad])])
        mask = torch.stack([torch.ones(9, dtype=torch.long), (ids[1] > 0).long()])
        for result, expected in zip(lens.stream({"input_ids": ids, "attention_mask": mask}), alone, strict=True):
            for scope in expected.scopes:
                size = expected[scope].abs().amax(-1, keepdim=True)
                assert float(((result[scope] - expected[scope]).abs() / size).max()) < 1e-5, (scope, left)


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_and_vectors(name: str) -> None:
    """Some rows of some layers, and the vectors whose norms the maps are."""
    lens = lens_of(name)
    encoding = inputs(name, lens.model, 9)
    whole, some = lens.analyze(encoding), lens.analyze(encoding, rows=[1, 7])
    for scope in whole.scopes:
        torch.testing.assert_close(some[scope], whole[scope][:, [1, 7]], rtol=1e-5, atol=1e-7)
    for scope in ("attention", "layer"):
        for layer in whole.layers:
            found = whole.parts(scope, layer)
            torch.testing.assert_close(found.contributions.norm(dim=-1), whole[scope][layer], rtol=1e-6, atol=1e-9)
            total = found.contributions.sum(1) + found.bias
            torch.testing.assert_close(total, found.actual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_value_bias_in_the_remainder(name: str) -> None:
    """The bias of a convolution belongs to no token in either case."""
    lens = lens_of(name)
    encoding = inputs(name, lens.model, 7)
    token, remainder = (lens.analyze(encoding, value_bias=one, scopes=["layer"]) for one in ("token", "remainder"))
    for n, kind in enumerate(layer_kinds(name)):
        if kind == "MIX":
            torch.testing.assert_close(token["layer"][n], remainder["layer"][n])


@pytest.mark.parametrize("name", HYBRIDS)
def test_float32(name: str) -> None:
    model = tiny(name, dtype=torch.float32)
    result = Analyzer(model).analyze(inputs(name, model, 70))
    expected = lens_of(name).analyze(inputs(name, lens_of(name).model, 70))
    assert max(float(one.max()) for one in result.completeness.values()) < 1e-4
    for scope in expected.scopes:
        size = expected[scope].abs().amax(-1, keepdim=True)
        assert float(((result[scope] - expected[scope]).abs() / size).max()) < 1e-3


@pytest.mark.parametrize("name", HYBRIDS)
def test_by_source(name: str) -> None:
    """Every token a source of its own: another way through the same layers."""
    lens = lens_of(name)
    encoding = inputs(name, lens.model, 7)
    by_source, tokens = lens.analyze(encoding, sources="token"), lens.analyze(encoding)
    for scope in tokens.scopes:
        torch.testing.assert_close(by_source[scope], tokens[scope], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", HYBRIDS)
def test_two_sources_in_a_batch(name: str) -> None:
    """Even and odd tokens, against the summed vectors and weights of the tokens of each input alone."""
    lens = lens_of(name)
    items = [one for n in (12, 9, 2) for one in encode(lens.loaded, inputs(name, lens.model, n))]
    indices = ({"decoder": torch.arange(n) % 2} for n in (12, 9, 2))
    divided = [replace(one, sources=Sources(("a", "b"), of)) for one, of in zip(items, indices, strict=True)]
    found = run_batch(lens.loaded, divided, requests_for(lens.loaded, Options()), Workspace())
    for result, n in zip(found, (12, 9, 2), strict=True):
        tokens = lens.analyze(inputs(name, lens.model, n))
        places = {one.token: place for place, one in enumerate(result.columns)}
        for scope in tokens.scopes:
            for layer in tokens.layers:
                weights = scope.endswith("-W")
                each = tokens[scope][layer][..., None] if weights else tokens.parts(scope, layer).contributions
                for start, source in enumerate("ab"):
                    total = each[:, start::2].sum(1)
                    expected = total[..., 0] if weights else total.norm(dim=-1)
                    cells = result[scope][layer][:, places[source]]
                    torch.testing.assert_close(cells, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_model_is_left_as_it_was(name: str) -> None:
    lens = lens_of(name)
    files = {sys.modules[type(module).__module__] for module in lens.model.modules()}
    before = {(file, one): getattr(file, one, None) for file in files for one in RECURRENCES}
    lens.analyze(inputs(name, lens.model, 5))
    with pytest.raises(NormscopeError):
        lens.analyze({"input_ids": torch.tensor([[10**6]])})
    assert {(file, one): getattr(file, one, None) for file, one in before} == before


def test_what_is_refused() -> None:
    lens = lens_of("qwen3_5_text")
    encoding = inputs("qwen3_5_text", lens.model, 5)
    with pytest.raises(NormscopeError, match="multiplies the mixed values by a gate"):
        lens.analyze(encoding, heads=True)
    with pytest.raises(NormscopeError, match="may be negative and their rows do not sum to one"):
        lens.flow(encoding, method="rollout")
    with pytest.raises(NormscopeError, match="may be negative and their rows do not sum to one"):
        lens.flow(encoding, method="rollout:weights")
    with pytest.raises(NormscopeError, match="by a recurrence"):
        run_uniform_attention(lens.loaded, encode(lens.loaded, encoding), [0])


def test_a_changed_recurrence_is_found() -> None:
    """A hook that changes the values between projection and recurrence."""
    model = copy.deepcopy(lens_of("qwen3_5_text").model)
    model.layers[0].linear_attn.in_proj_qkv.register_forward_hook(lambda module, args, out: out * 1.01)
    model.layers[0].linear_attn.norm.register_forward_hook(lambda module, args, out: out * 1.01)
    with pytest.raises(NormscopeError, match=r"linear_attn\.(out_proj|in_proj_qkv)"):
        Analyzer(model).analyze(inputs("qwen3_5_text", model, 5))


def test_biases_of_a_short_convolution() -> None:
    """Biases of B, C, x, the convolution and the output: values keep those of the gates, the rest is the remainder."""
    lens = Analyzer(tiny("lfm2", conv_bias=True))
    encoding = inputs("lfm2", lens.model, 9)
    result = lens.analyze(encoding)
    assert max(float(one.max()) for one in result.completeness.values()) < 1e-6
    assert float(result.remainder("attention")[[0, 2]].min()) > 0
    found = lens.flow(encoding)
    assert float(found.completeness.max()) < 1e-6


def test_shown_in_the_viewer_and_in_files(tmp_path: Path) -> None:
    """The viewer draws sizes and says so; files keep the signs."""
    lens = lens_of("qwen3_5_text")
    result = lens.analyze(inputs("qwen3_5_text", lens.model, 8))
    header, _ = pack_document(result)
    assert [one for one in header["warnings"] if "sizes of weights that may be negative" in one]
    drawn = torch.frombuffer(bytearray(document_map_bytes(result, "decoder", "MIX-W")), dtype=torch.float32)
    torch.testing.assert_close(drawn.double().view(3, 8, 8), result["MIX-W"].abs(), rtol=1e-6, atol=1e-9)
    result.to_html(tmp_path / "page.html")
    result.save(tmp_path / "maps.safetensors")
    assert torch.equal(Analysis.load(tmp_path / "maps.safetensors")["MIX-W"], result["MIX-W"])
    assert [one["label"] for one in header["sides"][0]["components"]] == ["LN", "ATTN", "+RES", "LN", "FF", "+RES"]
