"""Spans, continuations, log-probabilities, contrasts and vectors as targets, against flows to single logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normscope import Analyzer, Flow, Passage, Similarity
from normscope.flow.exact import exact_input_by_source, exact_score_matrix
from normscope.flow.maps import FrozenModel, forward_block, forward_layer
from normscope.flow.output_head import freeze_to_end
from normscope.flow.resolve import TargetRequest, resolve_target
from normscope.flow.spans import spell_tokens
from normscope.inputs.encode import encode
from tests.helpers.compare import refused, relative
from tests.helpers.flow_cases import CASES, encoding, open_case, tolerance
from tests.helpers.tiny import ENCODER_DECODER, IMAGES, tiny
from tests.helpers.toys import causal, classifier, masked, speaker, toy_lens, translator

WRITERS = [
    (name, head)
    for name, head in CASES
    if head in ("CausalLM", "Seq2SeqLM", "LMHead") and name not in (*IMAGES, "whisper")
]


def written(lens: Analyzer, given: dict[str, Tensor]) -> Tensor:
    return given["decoder_input_ids" if lens.two_sided else "input_ids"][0]


def sources_of(model: FrozenModel, layers: int | None = None) -> Tensor:
    """(n, sources + 1, d): the last side's states by input token and, last, the remainder."""
    counts = [len(stack.states[0]) for stack in model.stacks]
    encoder: Tensor | None = None
    X = torch.empty(0)
    for stack in model.stacks:
        begin = 0 if stack is model.stacks[-1] else counts[-1]
        X = exact_input_by_source(stack.states[0], begin, sum(counts), remainder=True)
        for layer in stack.layers:
            X = forward_layer(layer, X, encoder)
        encoder = forward_block(stack.end, X, encoder, True)
    return X


@pytest.mark.parametrize(("name", "head"), WRITERS)
def test_a_span_is_the_sum_of_its_tokens(name: str, head: str) -> None:
    lens, given, _, _ = open_case(name, head)
    ids = written(lens, given)
    a, b = 2, len(ids)
    singles = [lens.flow(given, target=int(ids[p]), position=p - 1) for p in range(a, b)]
    span = lens.flow(given, target=slice(a, b))
    each = lens.flow(given, target=slice(a, b), each=True)
    scores = torch.stack([one.scores for one in singles])
    assert relative(span.scores, scores.sum(0)) <= 1e-9
    assert each.scores.shape == (b - a, len(each.columns))
    assert relative(each.scores, scores) <= 1e-9
    assert span.value == pytest.approx(sum(one.value for one in singles), rel=1e-9)
    assert span.remainder == pytest.approx(sum(one.remainder for one in singles), rel=1e-9, abs=1e-9)
    for n, one in enumerate(singles):
        assert float(each.value[n]) == pytest.approx(one.value, rel=1e-9)
        assert float(each.remainder[n]) == pytest.approx(one.remainder, rel=1e-9, abs=1e-9)
    assert each.each is not None
    assert span.to is not None
    assert max(span.to.completeness, float(each.each.completeness.max())) <= tolerance(name)
    for side, table in span.to.layers.items():
        assert relative(table, sum(one.to.layers[side] for one in singles)) <= 1e-9  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "head"), [("llama", "CausalLM"), ("gpt2", "CausalLM"), ("t5", "Seq2SeqLM")])
def test_log_probabilities_with_their_expectation_held(name: str, head: str) -> None:
    """``log p_y``: every logit of the row, weighted by its probability, is subtracted."""
    lens, given, _, frozen = open_case(name, head)
    assert frozen.logits is not None
    p, index = 3, int(written(lens, given)[3])
    found = lens.flow(given, target=slice(p, p + 1), log_prob=True)
    weights = frozen.logits[p - 1].softmax(-1)
    singles = [lens.flow(given, target=k, position=p - 1) for k in range(len(weights))]
    expected = singles[index].scores - sum(float(w) * one.scores for w, one in zip(weights, singles, strict=True))
    assert relative(found.scores, expected) <= 1e-9
    assert found.value == pytest.approx(float(weights[index].log()), rel=1e-9)
    assert float(found.scores.sum()) + found.remainder == pytest.approx(found.value, rel=1e-6)
    same = lens.flow(given, target=index, position=p - 1, log_prob=True)
    assert relative(same.scores, found.scores) <= 1e-12


@pytest.mark.parametrize(("name", "head"), [("llama", "CausalLM"), ("bart", "Seq2SeqLM")])
def test_contrasts(name: str, head: str) -> None:
    lens, given, _, frozen = open_case(name, head)
    assert frozen.logits is not None
    ids = written(lens, given)
    spans = slice(1, 4)
    rows = frozen.logits[:3].clone()
    rows[range(3), ids[1:4]] = -torch.inf
    pairs = [lens.flow(given, target=(int(ids[p]), int(rows[p - 1].argmax())), position=p - 1) for p in (1, 2, 3)]
    found = lens.flow(given, target=spans, each=True, against="runner-up")
    assert relative(found.scores, torch.stack([one.scores for one in pairs])) <= 1e-9
    torch.testing.assert_close(found.value, torch.tensor([one.value for one in pairs], dtype=torch.float64))
    mean = lens.flow(given, target=spans, against="mean")
    everything = [lens.flow(given, target=slice(1, 4), against=k) for k in range(frozen.logits.shape[1])]
    assert relative(mean.scores, sum(one.scores for one in everything) / len(everything)) <= 1e-9  # type: ignore[arg-type]
    difference = lens.flow(given, target=(slice(1, 3), slice(3, 5)))
    one, other = lens.flow(given, target=slice(1, 3)), lens.flow(given, target=slice(3, 5))
    assert relative(difference.scores, one.scores - other.scores) <= 1e-9
    assert difference.value == pytest.approx(one.value - other.value)
    paired = lens.flow(given, target=(slice(1, 3), slice(3, 5)), each=True)
    assert relative(paired.scores.sum(0), difference.scores) <= 1e-9
    unequal = lens.flow(given, target=(slice(1, 2), slice(3, 5)), log_prob=True)
    parts = [lens.flow(given, target=some, log_prob=True) for some in (slice(1, 2), slice(3, 5))]
    assert relative(unequal.scores, parts[0].scores - parts[1].scores) <= 1e-9
    assert unequal.remainder == pytest.approx(parts[0].remainder - parts[1].remainder)


@pytest.mark.parametrize(("name", "head"), [("bert", None), ("llama", "CausalLM"), ("bart", None), ("gpt2", None)])
def test_the_projection_of_a_state(name: str, head: str | None) -> None:
    lens, given, _, frozen = open_case(name, head)
    state = frozen.stacks[-1].states[-1]
    vector = torch.randn(state.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = lens.flow(given, target=vector, position=2)
    X = sources_of(frozen)
    assert relative(found.scores, X[2, :-1] @ vector) <= 1e-9
    assert found.remainder == pytest.approx(float(X[2, -1] @ vector), rel=1e-9, abs=1e-9)
    assert found.value == pytest.approx(float(state[2] @ vector), rel=1e-9)
    again = lens.flow(given, target=vector.float().numpy(), position=2)
    assert relative(again.scores, found.scores) <= 1e-6


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_the_similarity_of_two_texts_on_both_sides(pooling: Any) -> None:
    lens = toy_lens()
    texts = "the cat sat", "a big dog ran on the mat"
    states = []
    for text in texts:
        given = lens.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states.append(lens.model(**given).last_hidden_state[0])
    pooled = [{"mean": x.mean(0), "first": x[0], "last": x[-1]}[pooling] for x in states]
    expected = float(torch.cosine_similarity(*pooled, dim=0))
    for own, text, other in ((0, *texts), (1, *texts[::-1])):
        found = lens.flow(text, target=Similarity(other, pooling))
        assert found.value == pytest.approx(expected, rel=1e-9)
        assert float(found.scores.sum()) + found.remainder == pytest.approx(expected, rel=1e-9)
        (item,) = encode(lens.loaded, text)
        X = sources_of(freeze_to_end(lens.loaded, item))
        rows = {"mean": X.mean(0), "first": X[0], "last": X[-1]}[pooling]
        unit = pooled[1 - own] / pooled[1 - own].norm() / pooled[own].norm()
        assert relative(found.scores, rows[:-1] @ unit) <= 1e-9


def test_the_similarity_after_the_last_norm() -> None:
    """ModernBERT has a norm between its last layer and its output."""
    model = tiny("modernbert")
    lens, given = Analyzer(model), encoding("modernbert", model)
    with torch.no_grad():
        mine = model(**given).last_hidden_state[0].mean(0)
        other = {key: value[:, :4] for key, value in given.items()}
        theirs = model(**other).last_hidden_state[0].mean(0)
    found = lens.flow(given, target=Similarity(other))
    assert found.value == pytest.approx(float(torch.cosine_similarity(mine, theirs, dim=0)), rel=1e-6)
    assert float(found.scores.sum()) + found.remainder == pytest.approx(found.value, rel=1e-9)


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_blocks_of_targets_of_any_size(targets: int) -> None:
    lens, _, item, frozen = open_case("llama", "CausalLM")
    target = resolve_target(lens.loaded, frozen, item, TargetRequest(slice(1, 7), each=True))
    whole = exact_score_matrix(frozen, target)
    size = 8 * 7 * max(1, targets) * 500
    torch.testing.assert_close(exact_score_matrix(frozen, target, block_bytes=size).scores, whole.scores)
    torch.testing.assert_close(exact_score_matrix(frozen, target, block_bytes=1).remainders, whole.remainders)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_the_last_of_two_tokens(name: str) -> None:
    head = "Seq2SeqLM" if name in ENCODER_DECODER else "CausalLM"
    lens, _, _, _ = open_case(name, head)
    given = encoding(name, lens.model, head, 2)
    last = len(written(lens, given)) - 1
    span = lens.flow(given, target=slice(last, last + 1))
    assert (
        relative(span.scores, lens.flow(given, target=int(written(lens, given)[last]), position=last - 1).scores) == 0
    )


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_beyond_a_sliding_window(name: str) -> None:
    model = tiny(name, "CausalLM", sliding_window=4)
    lens, given = Analyzer(model), encoding(name, model, length=13)
    ids = given["input_ids"][0]
    found = lens.flow(given, target=slice(9, 13), each=True)
    singles = [lens.flow(given, target=int(ids[p]), position=p - 1).scores for p in range(9, 13)]
    assert relative(found.scores, torch.stack(singles)) <= 1e-9
    assert found.each is not None
    assert float(found.each.completeness.max()) <= tolerance(name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    lens, given, _, _ = open_case("llama", "CausalLM")
    pad = torch.zeros(1, 3, dtype=torch.long)
    order = (lambda a, b: [b, a]) if side == "left" else (lambda a, b: [a, b])
    padded = {
        "input_ids": torch.cat(order(given["input_ids"], pad + 1), 1),
        "attention_mask": torch.cat(order(torch.ones_like(given["input_ids"]), pad), 1),
    }
    plain, found = (lens.flow(one, target=slice(2, 6), each=True) for one in (given, padded))
    assert relative(found.scores, plain.scores) <= 1e-9


@pytest.mark.parametrize("method", ["decompx", "gradient_x_input", "integrated_gradients", "alti_logit"])
def test_other_methods_add_up_the_tokens_of_a_span(method: str) -> None:
    lens, given, _, _ = open_case("llama", "CausalLM")
    ids = given["input_ids"][0]
    for options in ({}, {"log_prob": True}, {"against": "runner-up"}):
        found = lens.flow(given, target=slice(2, 5), method=method, **options)
        singles = [
            lens.flow(given, target=int(ids[p]), position=p - 1, method=method, **options).scores for p in (2, 3, 4)
        ]
        assert relative(found.scores, torch.stack(singles).sum(0)) <= 1e-6
    refused(lambda: lens.flow(given, target=slice(2, 5), method=method, each=True), "each=True", "exact")
    refused(lambda: lens.flow(given, target=torch.ones(24), position=2, method=method), "exact")


def test_a_method_without_scores_refuses_a_sum() -> None:
    refused(lambda: speaker().flow("the cat sat on", target=slice(1, 3), method="rollout"), "exact")
    assert speaker().flow("the cat sat on", target=slice(1, 2), method="rollout").scores.shape == (5,)


def test_a_passage_of_the_text() -> None:
    lens = speaker()
    text = "the cat sat on a mat"
    assert flows_equal(lens.flow(text, target=Passage("cat sat")), lens.flow(text, target=slice(2, 4)))
    assert flows_equal(lens.flow(text, target=Passage(" on")), lens.flow(text, target=slice(4, 5)))
    written = lens.flow(text, target=Passage(), generate=3)
    assert flows_equal(written, lens.flow(text, target=slice(7, 10), generate=3))
    refused(
        lambda: lens.flow("the cat sat on the cat", target=Passage("cat")),
        "2 times",
        "4 (tokens 2 to 2)",
        "19 (tokens 6 to 6)",
    )
    refused(lambda: lens.flow(text, target=Passage("dog")), "no 'dog'")
    refused(lambda: lens.flow(text, target=Passage(" ")), "empty")
    refused(lambda: lens.flow(text, target=Passage()), "Nothing was generated")


def flows_equal(one: Flow, other: Flow) -> bool:
    return torch.equal(one.scores, other.scores) and one.value == other.value


def test_the_text_of_tokens() -> None:
    tokenizer = speaker().tokenizer
    ids = tokenizer("the cat sat")["input_ids"]
    text, spans = spell_tokens(tokenizer, ids)
    assert text == "the cat sat"
    assert [text[a:b].strip() for a, b in spans] == ["", "the", "cat", "sat"]


def test_a_text_of_several_tokens_continues_the_input() -> None:
    lens = speaker()
    found = lens.flow("the cat", target="on a mat")
    assert flows_equal(found, lens.flow("the cat on a mat", target=slice(3, 6)))
    assert found.tokens == ("<s>", "the", "cat", "on", "a", "mat")
    assert float(found.scores[-1]) == 0  # nothing reads the last token


def test_the_contrast_of_two_continuations() -> None:
    lens = speaker()
    one = lens.flow("the cat", target="on a mat", log_prob=True)
    other = lens.flow("the cat", target="the dog", log_prob=True)
    for found in (
        lens.flow("the cat", target=("on a mat", "the dog"), log_prob=True, sources="word"),
        lens.flow("the cat", target="on a mat", against="the dog", log_prob=True, sources="word"),
    ):
        assert found.tokens == ("<s>", "the", "cat", "on", "a", "mat", "the", "dog")
        expected = torch.cat([one.scores[:3] - other.scores[:3], one.scores[3:], -other.scores[3:]])
        assert relative(found.scores, expected) <= 1e-9
        assert found.value == pytest.approx(one.value - other.value)
        assert float(found.scores.sum()) + found.remainder == pytest.approx(found.value, rel=1e-6)
        assert not found.has_maps
        assert sum(found.by_source.values()) == pytest.approx(float(found.scores.double().sum()))
        assert found.by_source["(answer)"] == pytest.approx(float(expected[3:].double().sum()))
    refused(lambda: lens.flow("the cat", target=("on a mat", "the dog")), "3 tokens", "2", "log_prob=True")
    equal = lens.flow("the cat", target=("a mat", "the dog"), each=True)
    assert equal.scores.shape == (2, 7)
    assert relative(equal.scores.sum(0), lens.flow("the cat", target=("a mat", "the dog")).scores) <= 1e-9


def test_the_contrast_of_two_translations() -> None:
    lens = translator()
    found = lens.flow(("the cat sat", "le"), target=("chat sur", "un tapis"))
    assert [label.side for label in found.columns][-6:] == [
        "other",
        "other",
        "encoder",
        "encoder",
        "encoder",
        "encoder",
    ]
    assert float(found.scores.sum()) + found.remainder == pytest.approx(found.value, rel=1e-6, abs=1e-6)


def test_scores_by_source() -> None:
    lens = speaker()
    text = "the cat sat on a mat"
    spans = {"cat": (0, 7), "place": (11, 20)}
    found = lens.flow(text, target="top", sources=spans)
    scores = found.scores.double()
    assert list(found.by_source) == ["cat", "place", "(rest)"]
    assert found.by_source["cat"] == pytest.approx(float(scores[1:3].sum()), rel=1e-12)
    assert found.by_source["place"] == pytest.approx(float(scores[4:].sum()), rel=1e-12)
    assert found.by_source["(rest)"] == pytest.approx(float(scores[0] + scores[3]), rel=1e-12)
    each = lens.flow(text, target=slice(2, 5), each=True, sources=spans)
    total = sum(each.by_source.values())
    torch.testing.assert_close(total, each.scores.double().sum(-1), rtol=1e-12, atol=1e-12)
    joined = lens.flow(sources=["the cat", "a mat"], template="{0} on {1}", target="top")
    assert set(joined.by_source) == {"source 1", "source 2", "(rest)"}
    refused(lambda: lens.flow(text, target="top").by_source, "no sources")
    refused(lambda: lens.flow(text, target="top", sources={"a": (0, 7), "b": (4, 9)}), "overlap")


@pytest.mark.parametrize(
    ("target", "options", "parts"),
    [
        (slice(0, 2), {}, ("position 0",)),
        (slice(None), {}, ("position 0",)),
        (slice(3, 3), {}, ("empty",)),
        (slice(4, 2), {}, ("empty",)),
        (slice(2, 9), {}, ("outside", "7 tokens")),
        (slice(-9, 2), {}, ("outside",)),
        (slice(1, 5, 2), {}, ("consecutive", "step 2")),
        (slice("a", 2), {}, ("slice of positions",)),
        (slice(1, 3), {"position": 2}, ("position=",)),
        (slice(1, 3), {"against": ""}, ("not in the vocabulary",)),
        ((slice(1, 3), "cat"), {}, ("two spans",)),
        ((slice(1, 3), slice(1, 3)), {}, ("the same",)),
        ((slice(1, 3), slice(3, 4)), {}, ("2 and 1 tokens", "log_prob=True")),
        ((slice(1, 3), slice(3, 4)), {"each": True, "log_prob": True}, ("pairs",)),
        ((slice(1, 3), slice(3, 5)), {"against": "mean"}, ("leave against= out",)),
        ("top", {"each": True}, ("each=True",)),
        (3, {"each": True}, ("each=True",)),
        (3, {"each": 1}, ("True or False",)),
        (3, {"against": 3}, ("the same",)),
        (None, {"against": "mean"}, ("give a target",)),
        (torch.ones(5), {}, ("24 numbers",)),
        (torch.zeros(24), {}, ("zero",)),
        (torch.ones(24), {"log_prob": True}, ("direction in the states",)),
        (torch.ones(24), {"position": 7}, ("no position 7",)),
        (Similarity("the dog", "median"), {}, ("pooling",)),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(target: Any, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    refused(lambda: speaker().flow("the cat sat on a mat", target=target, **options), *parts)


def test_models_without_spans() -> None:
    refused(lambda: masked().flow("the [MASK] sat", target=slice(1, 2)), "left to right")
    refused(lambda: classifier().flow("the cat", target=slice(1, 2)), "logits of classes")
    refused(lambda: toy_lens().flow("the cat", target=slice(1, 2)), "no head")
    refused(lambda: toy_lens().flow("the cat", target=torch.ones(24)), "position=")
    assert causal().flow("the cat", target=torch.ones(24)).scores.shape == (4,)
