"""The exact flow: complete, the same forwards and backwards, and equal to autograd in the frozen model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from normscope import Analyzer, NormscopeError
from normscope.flow import exact
from normscope.flow.maps import FrozenModel, forward_block, forward_layer, forward_map
from normscope.flow.output_head import freeze_with_output_head
from tests.helpers.compare import relative, state_of
from tests.helpers.detached import Detached, integrated
from tests.helpers.flow_cases import CASES, LANGUAGE, encoding, open_case, place, tolerance
from tests.helpers.tiny import CONFIGS, ENCODER_DECODER, GATED, IMAGES, tiny


@pytest.mark.parametrize(("name", "head"), CASES)
def test_sums_to_the_models_own_logits_and_states(name: str, head: str) -> None:
    lens, given, _, frozen = open_case(name, head)
    with torch.no_grad():
        plain = lens.model(**given).logits[0]
    assert frozen.logits is not None
    row = place(frozen)
    value = plain.reshape(frozen.logits.shape)[row, 1]
    found = lens.flow(given, target=1, position=row)
    assert found.value == pytest.approx(float(value), rel=1e-5, abs=1e-5)  # the plain pass attends in another order
    size = max(abs(found.value), float(found.scores.abs().sum()))
    assert abs(float(found.scores.sum()) + found.remainder - found.value) <= tolerance(name) * size
    assert found.to is not None
    assert found.to.completeness <= tolerance(name)
    assert found.completeness is not None
    assert float(found.completeness.max()) <= tolerance(name)
    assert found.maps.shape == (len(found.layers), len(found.rows), len(found.columns))
    assert len(found.scores) == len(found.columns) == len(found.tokens)


@pytest.mark.parametrize(("name", "head"), CASES)
def test_backwards_equals_forwards(name: str, head: str) -> None:
    """One adjoint pass for each of some targets, against all sources carried through the model and its head."""
    lens, given, _, frozen = open_case(name, head)
    logits = forwards(frozen)  # (rows, sources and the remainder, classes)
    for row, index in [(0, 0), (place(frozen), 1), (len(logits) - 1, -1)]:
        found = lens.flow(given, target=index, position=row)
        assert relative(found.scores, logits[row, :-1, index]) <= 1e-9
        assert found.remainder == pytest.approx(float(logits[row, -1, index]), rel=1e-9, abs=1e-9)
        assert found.to is not None
        for side, by_token in found.to.layers.items():
            if side == lens.loaded.stacks[-1].side and not lens.two_sided:  # at every layer the same sum
                total = by_token.sum(-1) + found.to.remainders[side]
                torch.testing.assert_close(total, torch.full_like(total, found.value), rtol=0, atol=1e-5)


def forwards(frozen: FrozenModel) -> Tensor:
    """The logits by source: the last side's tokens, the encoder's, the remainder."""
    counts = [len(stack.states[0]) for stack in frozen.stacks]
    encoder = None
    for stack in frozen.stacks:
        begin = 0 if stack is frozen.stacks[-1] else counts[-1]
        X = exact.exact_input_by_source(stack.states[0], begin, sum(counts), remainder=True)
        for layer in stack.layers:
            X = forward_layer(layer, X, encoder)
        encoder = forward_block(stack.end, X, encoder, True)
    assert encoder is not None
    X = encoder
    for one in frozen.head:
        X = forward_map(one, X, None, True)
    return X


@pytest.mark.parametrize(("name", "head"), LANGUAGE)
def test_blocks_of_sources_of_any_size(name: str, head: str) -> None:
    _, _, _, frozen = open_case(name, head)
    whole, _ = exact.exact_maps(frozen)
    size = whole.element_size() * 24 * max(len(stack.states[0]) for stack in frozen.stacks) * 6
    for some in (1, 2, 3):
        found, error = exact.exact_maps(frozen, block_bytes=some * size)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)
        assert float(error.max()) <= tolerance(name)


@pytest.mark.parametrize(("name", "head"), [case for case in CASES if case[0] != "gpt_oss"])
def test_scores_against_autograd(name: str, head: str) -> None:
    lens, given, _, frozen = open_case(name, head)
    row = place(frozen)
    found = lens.flow(given, target=1, position=row, gate="frozen" if name in GATED else "ig")
    expected = Detached(lens.model, given, name in GATED).scores(row, 1)
    assert_scores(found, expected, 1e-5 if tolerance(name) > 1e-9 else 1e-9)


def assert_scores(found: Any, expected: dict[str, Tensor], accuracy: float) -> None:
    order = [side for side in ("decoder", "encoder") if side in expected]
    assert relative(found.scores, torch.cat([expected[side][0] for side in order])) <= accuracy
    for side in order:
        assert relative(found.to.layers[side], expected[side]) <= accuracy


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_integrated_gates_against_autograd(name: str) -> None:
    """Both kinds of gates: the product g(a) u, and gpt-oss' function of a and u."""
    lens, given, _, _ = open_case(name, "CausalLM")
    with integrated_gates(name, lens.model):
        reference = Detached(lens.model, given)
    assert_scores(lens.flow(given, target=3, position=4), reference.scores(4, 3), 1e-5)


@contextmanager
def integrated_gates(name: str, model: Any) -> Iterator[None]:
    layer = model.model.layers[0]
    if name == "llama":

        def forward(self: Any, x: Tensor) -> Tensor:
            product = integrated(lambda a, u: nn.functional.silu(a) * u, self.gate_proj(x), self.up_proj(x))
            return self.down_proj(product)  # type: ignore[no-any-return]

        with patch.object(type(layer.mlp), "forward", forward):
            yield
    else:
        own = type(layer.mlp.experts)._apply_gate

        def apply(self: Any, both: Tensor) -> Tensor:
            def function(a: Tensor, u: Tensor) -> Tensor:
                return own(self, torch.stack([a, u], -1).flatten(-2))  # type: ignore[no-any-return]

            return integrated(function, both[..., ::2], both[..., 1::2], bend=self.limit)

        with patch.object(type(layer.mlp.experts), "_apply_gate", apply):
            yield


@pytest.mark.parametrize(("name", "head"), [case for case in LANGUAGE if case[0] != "gpt_oss"])
def test_maps_against_autograd(name: str, head: str) -> None:
    """||x_i<-k|| from the whole Jacobian of the frozen model, row by row."""
    lens, given, _, _ = open_case(name, head)
    found = lens.flow(given, gate="frozen" if name in GATED else "ig")
    reference = Detached(lens.model, given, name in GATED)
    order = [side for side in ("decoder", "encoder") if side in reference.states]
    for layer in (0, -1):
        vectors = reference.vectors(order[0], order, layer % len(found.layers) + 1)
        accuracy = 1e-5 if tolerance(name) > 1e-9 else 1e-9
        assert relative(found.maps[layer], vectors.norm(dim=-1)) <= accuracy


DEPTHS = ("num_hidden_layers", "n_layer", "num_decoder_layers", "decoder_layers")


@pytest.mark.parametrize(("name", "head"), LANGUAGE)
def test_exact_flow_of_one_layer_is_the_layer_scope(name: str, head: str) -> None:
    """With the value bias in the remainder. The encoder's columns are carried through the encoder too."""
    options = CONFIGS[name]
    model = tiny(name, head, **{key: 1 for key in DEPTHS if key in options})
    lens, given = Analyzer(model), encoding(name, model)
    scope = lens.analyze(given, value_bias="remainder", scopes=["layer"])
    if lens.two_sided:
        scope = scope.decoder
    found = lens.flow(given)
    own = len(found.rows)
    torch.testing.assert_close(found.maps[:, :, :own], scope["layer"][:, :, :own], rtol=tolerance(name), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "head"), [("bert", "SequenceClassification"), ("gpt2", "CausalLM"), ("bart", "Seq2SeqLM")]
)
def test_holes_in_the_mask(name: str, head: str) -> None:
    lens, given, _, _ = open_case(name, head)
    given = {key: value.clone() for key, value in given.items()}
    given["attention_mask"][0, [2, 4]] = 0
    row = 0 if head == "SequenceClassification" else 3
    found = lens.flow(given, target=1, position=row)
    real = given["attention_mask"][0].bool()
    columns = real if not lens.two_sided else torch.cat([torch.ones(5, dtype=torch.bool), real])
    assert [label.position for label in found.columns if label.side == lens.loaded.stacks[0].side] == [0, 1, 3, 5, 6]
    assert found.maps.shape[1:] == (5, int(columns.sum()))
    reference = Detached(lens.model, given)
    order = [side for side in ("decoder", "encoder") if side in reference.states]
    by_token = reference.scores(row, 1)
    expected = torch.cat([by_token[side][0] for side in order])[columns]
    assert relative(found.scores, expected) <= 1e-9
    rows = real if not lens.two_sided else slice(None)
    vectors = reference.vectors(order[0], order).norm(dim=-1)[rows][:, columns]
    assert relative(found.map, vectors) <= 1e-9
    assert found.to is not None
    assert found.to.completeness <= 1e-9


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_head_that_pools(pooling: str) -> None:
    model = tiny("modernbert", "SequenceClassification", classifier_pooling=pooling)
    lens, given = Analyzer(model), encoding("modernbert", model)
    for masked in ([], [2, 4]):
        given["attention_mask"][0, masked] = 0
        found = lens.flow(given, target=0)
        assert found.to is not None
        assert found.to.completeness <= 1e-9


@pytest.mark.parametrize(("name", "head"), [("bert", "MaskedLM"), ("llama", "CausalLM")])
def test_a_difference_of_two_logits(name: str, head: str) -> None:
    lens, given, _, _ = open_case(name, head)
    one, other, both = (lens.flow(given, target=target, position=2) for target in (7, 9, (7, 9)))
    torch.testing.assert_close(both.scores, one.scores - other.scores, rtol=1e-9, atol=1e-12)
    assert both.value == pytest.approx(one.value - other.value)
    assert both.remainder == pytest.approx(one.remainder - other.remainder)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(("name", "head"), [case for case in LANGUAGE if case[0] not in (*IMAGES, "whisper")])
def test_short_inputs(name: str, head: str, length: int) -> None:
    lens, _, _, _ = open_case(name, head)
    found = lens.flow(encoding(name, lens.model, head, length), target=3, position=-1)
    assert found.to is not None
    assert found.to.completeness <= tolerance(name)
    assert found.completeness is not None
    assert float(found.completeness.max()) <= tolerance(name)


@pytest.mark.parametrize(("name", "head"), [("bert", "MaskedLM"), ("gpt2", "CausalLM"), ("llama", "CausalLM")])
def test_single_precision_over_twelve_layers(name: str, head: str) -> None:
    depth = {"n_layer": 12} if name == "gpt2" else {"num_hidden_layers": 12}
    model = tiny(name, head, dtype=torch.float32, **depth)
    lens, given = Analyzer(model), encoding(name, model, length=20)
    found = lens.flow(given, target=3, position=-1)
    assert found.to is not None
    assert found.to.completeness <= 1e-4
    assert found.completeness is not None
    assert float(found.completeness.max()) <= 1e-4


def test_a_tangent_gate_is_not_complete_and_says_so() -> None:
    lens, given, _, _ = open_case("bert", "MaskedLM")
    found = lens.flow(given, target=3, position=2, gate="tangent")
    assert found.to is not None
    assert found.to.completeness > 1e-3


@pytest.mark.parametrize(("name", "head"), CASES)
def test_the_model_is_left_as_it_was(name: str, head: str) -> None:
    lens, given, _, frozen = open_case(name, head)
    before = state_of(lens.model)
    lens.flow(given, target=0, position=place(frozen)).maps  # noqa: B018
    assert state_of(lens.model) == before


def test_frozen_states_are_the_models_own() -> None:
    for name, head in (("bert", "MaskedLM"), ("gpt2", "CausalLM"), ("bart", "Seq2SeqLM")):
        lens, given, item, frozen = open_case(name, head)
        with torch.no_grad():
            made = lens.model(**given, output_hidden_states=True)
        for stack in frozen.stacks:
            key = f"{stack.side}_hidden_states" if name in ENCODER_DECODER else "hidden_states"
            for ours, theirs in list(zip(stack.states, made[key], strict=True))[:-1]:  # the last comes after a norm
                torch.testing.assert_close(ours, theirs[0], rtol=1e-9, atol=1e-9)
        assert freeze_with_output_head(lens.loaded, item).logits is not None


@pytest.mark.parametrize("options", [{"inner_group_num": 2}, {"num_hidden_groups": 2}], ids=str)
def test_groups_of_shared_layers(options: dict[str, int]) -> None:
    lens = Analyzer(tiny("albert", **options))
    found = lens.flow({"input_ids": torch.arange(5, 12)[None]})
    assert found.completeness is not None
    assert float(found.completeness.max()) <= 1e-9


def test_maps_that_do_not_add_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = Analyzer(tiny("albert", inner_group_num=2))
    monkeypatch.setattr("normscope.flow.exact.exact_relative_error", lambda found, actual: 0.1)
    with pytest.raises(NormscopeError, match="miss the model's own states"):
        _ = lens.flow({"input_ids": torch.arange(5, 12)[None]}).maps
