"""`gate="shapley"` in analyze(): every family against all orders of joining, written out in plain loops."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from normscope import Analyzer, NormscopeError
from normscope.decompose.shapley.gate import Shapley, parse_shapley_gate
from normscope.engine.request import Options, requests_for
from normscope.engine.run import batch_cost
from normscope.inputs.encode import encode
from normscope.models.scopes import layer_steps
from normscope.models.spec import Experts
from tests.helpers import layer_oracle, oracle_parts
from tests.helpers.compare import assert_same
from tests.helpers.layer_oracle import State, Unit
from tests.helpers.tiny import IMAGES, inputs, tiny

FAMILIES = (
    *("gpt2", "opt-post", "gpt_neox", "gpt_neox-sequential", "gptj", "llama", "gemma2", "phi3", "modernbert"),
    *("t5", "t5-gated", "bart", "marian"),
)
SINGLE = ("opt-post", "llama", "gemma2", "phi3", "modernbert", "t5", "t5-gated", "gpt_neox", "gpt_neox-sequential")


def all_orders(state: State, units: list[Unit], actual: Tensor) -> State:
    """The feed-forward with the players of every output in every order; the biases are the last player."""
    (unit,) = units
    vectors, bias = torch.zeros_like(state.vectors), torch.zeros_like(state.bias)
    columns = vectors.shape[1]
    players = range(columns + 1)
    for i in range(len(vectors)):
        z = []
        for weight, hidden_bias in unit.inputs:
            own = [state.vectors[i, j] @ weight for j in range(columns)]
            z.append([*own, state.bias[i] @ weight + hidden_bias])
        gains = [torch.zeros_like(z[0][0]) for _ in players]
        nothing = unit.function(*(torch.zeros_like(one[0]) for one in z))
        for order in permutations(players):
            sums = [torch.zeros_like(one[0]) for one in z]
            before = nothing
            for j in order:
                sums = [total + one[j] for total, one in zip(sums, z, strict=True)]
                after = unit.function(*sums)
                gains[j] = gains[j] + after - before
                before = after
        values = [gain / math.factorial(columns + 1) for gain in gains]
        for j in range(columns):
            vectors[i, j] = values[j] @ unit.weight
        bias[i] = (values[-1] + nothing) @ unit.weight + unit.bias
    return State(vectors, bias, actual)


def compare(lens: Analyzer, encoding: dict[str, Tensor], tolerance: float, gate: str) -> None:
    """Maps, remainders, mixing ratios and vectors of every scope of every layer."""
    result = lens.analyze(encoding, gate=gate)
    sides = result.sides if hasattr(result, "sides") else {result.info["side"]: result}
    expected = layer_oracle.oracle(lens.model, encoding)
    for side, found in sides.items():
        seen = 0
        for layer, truth in enumerate(expected[side]):
            ratios, maps = oracle_parts.mixing(truth), oracle_parts.maps(truth)
            for scope in found.scopes:
                if "FF" not in scope:
                    continue
                seen += 1
                top = maps[scope].amax(-1, keepdim=True)
                assert float(((found[scope][layer] - maps[scope]).abs() / top).max()) < tolerance, (side, scope)
                remainder = truth.bias[scope].norm(dim=-1)
                torch.testing.assert_close(found.remainder(scope)[layer], remainder, rtol=tolerance, atol=tolerance)
                torch.testing.assert_close(
                    found.mixing_ratio(scope)[layer], ratios[scope], rtol=tolerance, atol=tolerance
                )
                assert float(found.completeness[scope].max()) < tolerance
                vectors = found.parts(scope, layer)
                assert float((vectors.contributions - truth.vectors[scope]).abs().max() / top.max()) < tolerance
                assert float((vectors.bias - truth.bias[scope]).abs().max() / top.max()) < tolerance
        assert seen > 0


@pytest.fixture(autouse=True)
def _orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_oracle, "feed_forward", all_orders)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("gate", ["shapley", "shapley-exact"])
def test_every_kind_of_layer(name: str, gate: str) -> None:
    lens = Analyzer(tiny(name))
    compare(
        lens, inputs(name, lens.model, 3 if name in ("t5", "t5-gated", "bart", "marian") else 4, 2), _limit(name), gate
    )


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "sigmoid"])
def test_post_norm_encoder(activation: str) -> None:
    lens = Analyzer(tiny("bert", hidden_act=activation))
    compare(lens, {"input_ids": torch.tensor([[7, 20, 33, 9]])}, 1e-9, "shapley")


def test_shapley_differs_from_integrated_gradients() -> None:
    lens = Analyzer(tiny("bert"))
    given = {"input_ids": torch.tensor([[7, 20, 33, 9]])}
    shapley, ig = lens.analyze(given, gate="shapley"), lens.analyze(given)
    for scope in ("ATTN-W", "ATTNRESLN-N"):
        assert torch.equal(shapley[scope], ig[scope])
    for scope in ("ATTNRESLNFF-N", "ATTNRESLNFFRES-N", "ATTNRESLNFFRESLN-N"):
        assert float(((shapley[scope] - ig[scope]).abs() / ig[scope].amax(-1, keepdim=True)).max()) > 1e-2


def _limit(name: str) -> float:
    return 2e-6 if name in SINGLE else 1e-9


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5-gated", "dinov2-swiglu"])
def test_approximations_are_close_to_exact(name: str) -> None:
    lens = Analyzer(tiny(name))
    given = inputs(name, lens.model, 11, 5)
    exact, normal, drawn = (
        lens.analyze(given, gate=gate, layers=[1])
        for gate in ("shapley-exact", "shapley-gaussian", "shapley-sampled:512")
    )
    if hasattr(exact, "decoder"):
        exact, normal, drawn = exact.decoder, normal.decoder, drawn.decoder
    for scope in exact.scopes:
        top = exact[scope].amax(-1, keepdim=True)
        assert float(((normal[scope] - exact[scope]).abs() / top).max()) < 0.02
        assert float(((drawn[scope] - exact[scope]).abs() / top).max()) < 0.02
        assert float(normal.completeness[scope].max()) < 0.02
        assert float(drawn.completeness[scope].max()) < 1e-6
    assert exact.info["complete"]
    assert drawn.info["complete"]
    assert not normal.info["complete"]
    assert (exact.info["gate"], normal.info["gate"]) == ("shapley-exact", "shapley-gaussian")
    assert drawn.info["gate"] == "shapley-sampled:512:0"


def test_few_players_are_enumerated() -> None:
    """In a causal model the first outputs have few players; those are exact."""
    lens = Analyzer(tiny("gpt2"))
    given = inputs("gpt2", lens.model, 12)
    exact, auto, normal = (
        lens.analyze(given, gate=gate, scopes="ff", layers=[0])["ff"][0]
        for gate in ("shapley-exact", "shapley", "shapley-gaussian")
    )
    assert torch.equal(auto[:9], exact[:9])  # nine tokens and the biases
    assert torch.equal(auto[9:], normal[9:])
    assert not torch.equal(normal[:9], exact[:9])


def test_rows_batches_and_padding_change_nothing() -> None:
    lens = Analyzer(tiny("bert"))
    long, short = ({"input_ids": torch.arange(5, 5 + n)[None]} for n in (9, 5))
    hole = {"input_ids": torch.arange(5, 12)[None], "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 0, 1]])}
    for one, together in zip(
        (long, short, hole), lens.stream([long, short, hole], batch_size=3, gate="shapley"), strict=True
    ):
        assert_same(together, lens.analyze(one, gate="shapley"), 1e-9)
    whole, some = lens.analyze(long, gate="shapley"), lens.analyze(long, gate="shapley", rows=[7, 2])
    for scope in whole.scopes:
        torch.testing.assert_close(some[scope], whole[scope][:, [7, 2]], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(some.vectors("layer", 1), whole.vectors("layer", 1, [7, 2]), rtol=1e-9, atol=1e-12)


def test_value_bias_in_the_remainder() -> None:
    lens = Analyzer(tiny("bert"))
    result = lens.analyze({"input_ids": torch.tensor([[7, 20, 33, 9]])}, gate="shapley", value_bias="remainder")
    assert float(max(error.max() for error in result.completeness.values())) < 1e-12


def test_single_precision() -> None:
    given = {"input_ids": torch.tensor([[7, 20, 33, 9]])}
    wide, narrow = (
        Analyzer(tiny("bert", dtype=dtype)).analyze(given, gate="shapley") for dtype in (torch.float64, torch.float32)
    )
    for scope in wide.scopes:
        top = wide[scope].amax(-1, keepdim=True)
        assert float(((narrow[scope] - wide[scope]).abs() / top).max()) < 1e-4
        assert float(narrow.completeness[scope].max()) < 1e-5


def test_experts_are_refused() -> None:
    lens = Analyzer(tiny("mixtral"))
    assert any(isinstance(step.part, Experts) for step in layer_steps(lens.loaded.stacks[0].blocks))
    with pytest.raises(NormscopeError, match="mixture of experts"):
        lens.analyze(inputs("mixtral", lens.model, 4), gate="shapley")
    before = lens.analyze(inputs("mixtral", lens.model, 4), gate="shapley", scopes="attention-block")
    assert before.info["gate"] == "shapley"


def test_flow_is_refused() -> None:
    lens = Analyzer(tiny("bert"))
    with pytest.raises(NormscopeError, match="gates that are linear"):
        lens.flow({"input_ids": torch.tensor([[7, 20, 33, 9]])}, gate="shapley")


def test_too_long_to_enumerate() -> None:
    lens = Analyzer(tiny("bert"))
    with pytest.raises(NormscopeError, match="coalitions"):
        lens.analyze({"input_ids": torch.arange(5, 30)[None]}, gate="shapley-exact")


@pytest.mark.parametrize("gate", ["shapley-", "shapley-none", "shapley-exact:3", "shapley-sampled:x", "Shapley"])
def test_unknown_shapley_gates(gate: str) -> None:
    with pytest.raises(NormscopeError, match="Unknown gate"):
        Analyzer(tiny("bert")).analyze({"input_ids": torch.tensor([[7, 20]])}, gate=gate)


def test_names_of_shapley_gates() -> None:
    assert parse_shapley_gate("ig") is None
    assert parse_shapley_gate("shapley") == Shapley()
    assert parse_shapley_gate("shapley-sampled:40:3") == Shapley("sampled", 40, 3)
    for name in ("shapley", "shapley-exact", "shapley-gaussian", "shapley-sampled:64:2"):
        assert str(parse_shapley_gate(name)) == name
    with pytest.raises(NormscopeError, match="at least 4 permutations"):
        parse_shapley_gate("shapley-sampled:2")


def test_the_estimate_knows() -> None:
    lens = Analyzer(tiny("vit"))
    item = encode(lens.loaded, inputs("vit", lens.model)) if "vit" in IMAGES else []
    costs = [
        batch_cost(lens.loaded, item, requests_for(lens.loaded, Options(gate=gate)))
        for gate in ("ig", "shapley", "shapley-sampled:4096")
    ]
    assert costs[0].seconds < costs[1].seconds < costs[2].seconds
    assert costs[0].memory < costs[1].memory
