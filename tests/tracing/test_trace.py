"""A forward pass stops after the last requested record, and gives the same records as a whole pass."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from normscope import Analyzer, NormscopeError
from normscope.models.modules import has_layers, layer_modules
from normscope.models.registry import family_of
from normscope.models.scopes import scope_aliases, scope_names
from tests.helpers.compare import state_of
from tests.helpers.tiny import FAMILIES, inputs, tiny


def sides(result: Any) -> list[Any]:
    return [result.encoder, result.decoder] if hasattr(result, "decoder") else [result]


@pytest.mark.parametrize("scopes", [["weights"], ["attention"], ["attention-residual"], ["attention-block"]])
@pytest.mark.parametrize("name", FAMILIES)
def test_partial_requests_equal_the_whole_pass(name: str, scopes: list[str]) -> None:
    model = tiny(name)
    lens, encoding, before = Analyzer(model), inputs(name, model), state_of(model)
    whole, part = lens.analyze(encoding), lens.analyze(encoding, scopes=scopes)
    first = lens.analyze(encoding, scopes=scopes, layers=[0])
    for one, expected, early in zip(*map(sides, (part, whole, first)), strict=True):
        for scope in one.scopes:
            torch.testing.assert_close(one[scope], expected[scope], rtol=1e-12, atol=0)
            torch.testing.assert_close(one.completeness[scope], expected.completeness[scope], rtol=0, atol=1e-6)
            torch.testing.assert_close(early[scope][0], expected[scope][0], rtol=1e-12, atol=0)
    assert state_of(model) == before


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert"])
def test_a_pass_rounds_the_same_way_for_every_request(name: str) -> None:
    """Otherwise a float32 map would differ from the norms of the layer's vectors, which come from another pass."""
    model = tiny(name, dtype=torch.float32, num_hidden_layers=4)
    lens, encoding = Analyzer(model), inputs(name, model)
    whole, last = lens.analyze(encoding), lens.analyze(encoding, layers=[3])
    for scope in whole.scopes:
        assert torch.equal(last[scope][0], whole[scope][3])


@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "albert", "mpnet", "distilbert"])
def test_attention_is_the_model_s_own_to_the_last_digit(name: str) -> None:
    """Softmax is steep: other rounding of the weights moves cells of later layers beyond the tolerance."""
    model = tiny(name, dtype=torch.float32, num_hidden_layers=4)
    encoding = {"input_ids": torch.arange(5, 36)[None], "attention_mask": torch.ones(1, 31, dtype=torch.long)}
    found = Analyzer(model).analyze(encoding, heads=True).heads["ATTN-W"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = torch.cat(model(**encoding, output_attentions=True).attentions)
    assert torch.equal(found, own)


def counting(modules: list[nn.Module], patch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that have been run. Without hooks: with foreign hooks a pass always completes."""
    counted: list[nn.Module] = []

    def watch(module: nn.Module) -> None:
        forward = module.forward
        patch.setattr(module, "forward", lambda *args, **kwargs: (counted.append(module), forward(*args, **kwargs))[1])

    for module in modules:
        watch(module)
    return counted


def ran(model: PreTrainedModel, modules: list[nn.Module], **options: Any) -> int:
    """How many of the modules an analysis runs."""
    with pytest.MonkeyPatch.context() as patch:
        counted = counting(modules, patch)
        lens = Analyzer(model)
        counted.clear()  # what the proof has run
        lens.analyze({"input_ids": torch.arange(5, 14)[None]}, **options)
    return len(counted)


def test_layers_after_the_last_requested_are_not_run() -> None:
    model = tiny("bert", num_hidden_layers=4)
    layers = list(model.encoder.layer)
    assert ran(model, layers) == 4
    assert ran(model, layers, layers=[0, 2]) == 3
    assert ran(model, layers, layers=[0]) == 1


def test_nothing_runs_after_the_last_requested_scope() -> None:
    model = tiny("bert", num_hidden_layers=3)
    feed_forwards = [layer.intermediate for layer in model.encoder.layer]
    outputs = [layer.attention.output for layer in model.encoder.layer]
    assert ran(model, feed_forwards) == 3
    assert ran(model, feed_forwards, scopes=["attention-block"]) == 2
    assert ran(model, feed_forwards, scopes=["attention"], layers=[0]) == 0
    assert ran(model, outputs, scopes=["weights"], layers=[0]) == 1
    assert ran(model, [model.pooler]) == 0


def test_a_layer_is_reported_before_unrequested_work() -> None:
    model = tiny("bert", num_hidden_layers=3)
    encoding = {"input_ids": torch.arange(5, 14)[None]}
    with pytest.MonkeyPatch.context() as patch:
        counted = counting([layer.intermediate for layer in model.encoder.layer], patch)

        def progresses(scope: str) -> list[int]:
            """How many feed-forwards had run when each layer was done."""
            lens = Analyzer(model)
            counted.clear()
            seen: list[int] = []
            lens.analyze(encoding, scopes=[scope], progress=lambda *_: seen.append(len(counted)))
            return seen

        assert progresses("attention-block") == [0, 1, 2]
        assert progresses("ff") == [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "scope", "done"),
    [
        ("attention.output.dense", "attention", 1),
        ("attention.output.LayerNorm", "attention", 2),
        ("attention.output.LayerNorm", "attention-block", 1),
        ("output.LayerNorm", "attention-block", 2),
        ("output.LayerNorm", "layer", 1),
    ],
)
def test_nonfinite_layers_are_refused_before_they_are_reported(path: str, scope: str, done: int) -> None:
    model = tiny("bert", num_hidden_layers=4)
    lens = Analyzer(model)
    with torch.no_grad():
        model.encoder.layer[1].get_submodule(path).bias[0] = float("nan")
    seen: list[int] = []
    encoding = {"input_ids": torch.arange(5, 14)[None]}
    with pytest.raises(NormscopeError, match=r"Layer 1 .* NaN or infinite"):
        lens.analyze(encoding, scopes=[scope], progress=lambda one, _: seen.append(one))
    assert len(seen) == done
    with pytest.raises(NormscopeError, match=r"Layer 1 .* NaN or infinite"):
        Analyzer(copy.deepcopy(model))


def test_shared_layers_are_counted_by_their_calls() -> None:
    model = tiny("albert", num_hidden_layers=4)
    shared = layer_modules(model, family_of(model).stacks[0])
    assert ran(model, shared) == 4
    assert ran(model, shared, layers=[1]) == 2


def test_a_pass_that_others_watch_goes_to_the_end() -> None:
    model = tiny("bert", num_hidden_layers=3)
    layers = list(model.encoder.layer)
    handle = model.pooler.register_forward_hook(lambda *_: None)
    assert ran(model, layers, layers=[0]) == 3
    handle.remove()
    assert ran(model, layers, layers=[0]) == 1


def test_an_encoder_alone_needs_no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("marian")
    encoder, decoder = family_of(model).stacks
    assert has_layers(model, decoder)
    started = counting(layer_modules(model, decoder), monkeypatch)
    # A scope that only the decoder has, and one that only the encoder has.
    cross = scope_aliases(decoder.blocks)["cross-attention"]
    ours = next(scope for scope in scope_names(encoder.blocks) if scope not in scope_names(decoder.blocks))
    lens, encoding = Analyzer(model), inputs("marian", model)
    started.clear()  # what the proof has run
    result = lens.analyze(encoding, scopes=[ours])
    assert ours in result.encoder.scopes
    assert not started
    assert lens.analyze(encoding, scopes=[cross]).decoder is not None
    assert started


def test_chunks_of_the_feed_forward_are_waited_for() -> None:
    whole, chunked = (tiny("bert", chunk_size_feed_forward=size) for size in (0, 1))
    encoding = {"input_ids": torch.arange(5, 14)[None]}
    one, other = (Analyzer(model).analyze(encoding) for model in (whole, chunked))
    for scope in one.scopes:
        torch.testing.assert_close(other[scope], one[scope], rtol=1e-9, atol=0)
