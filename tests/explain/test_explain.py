"""Explanations: every token against flows to single logits, leave-one-out in the frozen network, and sums."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normscope import Analyzer, Explanation, NormscopeError, Passage
from normscope.explain import run
from normscope.explain.groups import SpelledText, group_tokens
from normscope.flow.exact import exact_score_blocks
from normscope.flow.maps import FrozenModel, forward_block, forward_layer, forward_map
from normscope.flow.output_head import freeze_with_output_head
from normscope.inputs.encode import encode
from normscope.labels import Label
from normscope.view.explained import explained_parts, explained_sentences, explained_tokens
from tests.helpers.compare import refused, relative, state_of
from tests.helpers.files import real_model
from tests.helpers.flow_cases import CASES, open_case, tolerance
from tests.helpers.tiny import IMAGES, tiny
from tests.helpers.toys import masked, named_classifier, speaker, toy_lens, translator

WRITERS = [
    (name, head) for name, head in CASES if head in ("CausalLM", "Seq2SeqLM") and name not in (*IMAGES, "whisper")
]


def write_greedily(lens: Analyzer, given: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The input with tokens that the model writes without a cache."""
    key = "decoder_input_ids" if lens.two_sided else "input_ids"
    given = {name: one for name, one in given.items() if "mask" not in name}
    for _ in range(count):
        with torch.no_grad():
            best = lens.model(**given, use_cache=False).logits[0, -1].argmax()
        given[key] = torch.cat([given[key], best.view(1, 1)], 1)
    return given


@pytest.mark.parametrize(("name", "head"), WRITERS)
def test_every_token_against_flows_to_single_logits(name: str, head: str) -> None:
    """Generation uses the cache, the loop does not."""
    lens, given, _, _ = open_case(name, head)
    if name.startswith("t5"):  # transformers' cache needs sides of equal depth
        lens = Analyzer(tiny(name, head, num_decoder_layers=2))
    key = "input_ids"
    if lens.two_sided:
        start = int(
            lens.model.generation_config.decoder_start_token_id or lens.model.config.decoder_start_token_id or 0
        )
        prompt = {"input_ids": given["input_ids"]}
        key = "decoder_input_ids"
        whole = write_greedily(lens, {**prompt, key: torch.tensor([[start]])}, 3)
    else:
        prompt = {"input_ids": given["input_ids"][:, :5]}
        whole = write_greedily(lens, prompt, 3)
    told = lens.explain(prompt, generate=3)
    ids = whole[key][0]
    begin = len(ids) - 3
    count = len(told.rows)  # fewer if an end token was written
    assert [label.position for label in told.rows] == list(range(begin, begin + count))
    for n in range(count):
        cut = {**whole, key: ids[None, : begin + count]}
        with torch.no_grad():
            row = lens.model(**cut).logits[0, begin + n - 1].clone()
        assert float(told.probabilities[n]) == pytest.approx(float(row.double().softmax(-1)[ids[begin + n]]), rel=1e-4)
        assert told.alternatives[n][0].probability == pytest.approx(float(row.double().softmax(-1).max()), rel=1e-4)
        row[ids[begin + n]] = -torch.inf
        target = int(ids[begin + n]), int(row.argmax())
        one = lens.flow(cut, target=target, position=begin + n - 1)
        assert relative(told.scores[n], one.scores) <= 1e-9
        assert float(told.values[n]) == pytest.approx(one.value, rel=1e-6)
        assert float(told.remainder[n]) == pytest.approx(one.remainder, rel=1e-6, abs=1e-9)
    assert float(told.completeness.max()) <= tolerance(name)


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "gpt2"])
def test_short_long_and_padded_prompts(name: str, length: int) -> None:
    """One and two tokens, and prompts longer than a sliding window of 4; padding on the left changes nothing."""
    window = {} if name == "gpt2" else {"sliding_window": 4}
    lens = Analyzer(tiny(name, "CausalLM", **window))
    ids = torch.randint(5, 50, (1, length), generator=torch.Generator().manual_seed(length))
    whole = write_greedily(lens, {"input_ids": ids}, 3)["input_ids"]
    told = lens.explain({"input_ids": ids}, generate=3)
    count = len(told.rows)
    for n in range(count):
        at = length + n
        with torch.no_grad():
            row = lens.model(input_ids=whole[:, :at], use_cache=False).logits[0, -1].clone()
        row[whole[0, at]] = -torch.inf
        target = int(whole[0, at]), int(row.argmax())
        one = lens.flow({"input_ids": whole[:, : length + count]}, target=target, position=at - 1)
        assert relative(told.scores[n], one.scores) <= 1e-6
    padded = {
        "input_ids": torch.cat([torch.full((1, 3), 1), ids], 1),
        "attention_mask": torch.tensor([[0, 0, 0] + [1] * length]),
    }
    again = lens.explain(padded, generate=3)
    if name != "gpt2":  # whose positions are absolute
        assert relative(again.scores, told.scores) <= 1e-6
    assert float(again.completeness.max()) <= 1e-5  # two of them compute norms in float32


def frozen_logits(model: FrozenModel, states: list[Tensor]) -> Tensor:
    """The logits of the frozen network for other inputs of its sides."""
    encoder: Tensor | None = None
    X = torch.empty(0)
    for stack, x in zip(model.stacks, states, strict=True):
        X = x[:, None]
        for layer in stack.layers:
            X = forward_layer(layer, X, encoder)
        encoder = forward_block(stack.end, X, encoder, True)
    assert encoder is not None
    X = encoder
    for one in model.head:
        X = forward_map(one, X, None, True)
    return X[:, 0]


@pytest.mark.parametrize(("name", "head"), [("llama", "CausalLM"), ("gpt2", "CausalLM"), ("bart", "Seq2SeqLM")])
def test_leaving_a_token_out_of_the_frozen_network(name: str, head: str) -> None:
    lens, given, _, _ = open_case(name, head)
    told = lens.explain(given, target=slice(2, 5), against=None)
    (item,) = encode(lens.loaded, given)
    model = freeze_with_output_head(lens.loaded, item)
    whole = frozen_logits(model, [stack.states[0] for stack in model.stacks])
    ids = given["decoder_input_ids" if lens.two_sided else "input_ids"][0, 2:5]
    for k, label in enumerate(told.columns):
        states = [stack.states[0].clone() for stack in model.stacks]
        side = next(n for n, stack in enumerate(model.stacks) if stack.side == label.side)
        states[side][label.position] = 0
        change = (whole - frozen_logits(model, states))[range(1, 4), ids]
        torch.testing.assert_close(told.scores[:, k], change, rtol=1e-7, atol=1e-9)


def test_sums() -> None:
    told = speaker().explain("the cat sat on", sources={"cat": (0, 7), "sat": (8, 11)}, generate=4)
    total = told.scores.double()
    assert list(told.by_source) == ["cat", "sat", "(answer)", "(rest)"]
    assert told.by_source["cat"] == pytest.approx(float(total[:, 1:3].sum()), rel=1e-12)
    assert told.by_source["(answer)"] == pytest.approx(float(total[:, 5:].sum()), rel=1e-12)
    assert sum(told.by_source.values()) + float(told.remainder.sum()) == pytest.approx(told.value, rel=1e-6)
    assert sum(told.shares.values()) == pytest.approx(told.value, rel=1e-6)
    assert told.shares["(first token)"] == pytest.approx(float(total[:, 0].sum()), rel=1e-12)
    for answer in ("token", "word", "sentence", "line"):
        for inputs in ("token", "word", "sentence", "line", "source"):
            found = told.grouped(answer, inputs)
            assert found.scores.shape == (len(found.rows), len(found.columns))
            assert float(found.scores.sum()) == pytest.approx(float(total.sum()), rel=1e-12)
            assert sorted(k for one in found.columns for k in one.places) == list(range(len(told.columns)))
            assert float(found.remainders.sum()) == pytest.approx(float(told.remainder.sum()))
    refused(lambda: told.grouped("paragraph"), "Unknown grain")


def test_no_sentence_extends_into_the_answer() -> None:
    told = speaker().explain("the cat", answer="on a mat")
    (row,) = told.grouped("sentence").rows
    assert row.name == told.answer == "on a mat"
    assert [one.name for one in told.grouped(inputs="sentence").columns] == ["<s>", "the cat", "on a mat"]


def test_sources_of_a_chat() -> None:
    told = speaker().explain(
        chat=[{"role": "user", "content": "what sat"}], sources=["the cat sat", "a mat"], template="{0} {1} {question}",
        generate=2,
    )  # fmt: skip
    assert {"source 1", "source 2", "question", "(answer)", "(rest)"} == set(told.by_source)


def test_given_and_generated_answers_are_the_same() -> None:
    lens = speaker()
    told = lens.explain("the cat sat", generate=3)
    again = lens.explain("the cat sat", answer=told.answer)
    assert again.tokens == told.tokens
    torch.testing.assert_close(again.scores, told.scores)
    span = lens.explain(f"the cat sat {told.answer}", target=slice(4, 7))
    torch.testing.assert_close(span.scores, told.scores)
    passage = lens.explain("the cat sat on a mat", target=Passage("on a mat"))
    assert passage.tokens == ("on", "a", "mat")


@pytest.mark.parametrize("against", [None, "mean", 7])
def test_other_contrasts(against: Any) -> None:
    lens = speaker()
    told = lens.explain("the cat sat on", target=slice(2, 5), against=against)
    flow = lens.flow("the cat sat on", target=slice(2, 5), each=True, against=against)
    assert torch.equal(told.scores, flow.scores)


@pytest.mark.parametrize(("answer", "against"), [("on a mat", "the dog ran"), ("on a mat", "dog"), ("mat", "on a mat")])
def test_the_contrast_with_another_answer(answer: str, against: str) -> None:
    """Token i against token i; what one has more stands alone, at the other's last token."""
    lens = speaker()
    told = lens.explain("the cat", answer=answer, against=against)
    count, other = len(answer.split()), len(against.split())
    one, two = (
        lens.flow(f"the cat {text}", target=slice(3, 3 + n), each=True, log_prob=True)
        for text, n in ((answer, count), (against, other))
    )
    expected = torch.zeros(count, 3 + count + other, dtype=torch.float64)
    expected[:, : 3 + count] = one.scores
    for n in range(other):
        row = min(n, count - 1)
        expected[row, :3] -= two.scores[n, :3]
        expected[row, 3 + count :] -= two.scores[n, 3:]
    assert relative(told.scores, expected) <= 1e-9
    assert told.value == pytest.approx(float(one.value.sum() - two.value.sum()))
    assert [label.side for label in told.columns].count("other") == other
    assert float(told.scores.sum() + told.remainder.sum()) == pytest.approx(told.value, rel=1e-6)


def test_answers_that_begin_alike() -> None:
    """What they share is explained by nothing but rounding, which is no error."""
    lens = Analyzer(tiny("llama", "CausalLM", dtype=torch.float32), speaker().tokenizer)
    told = lens.explain("the cat", answer="on a mat", against="on a dog")
    assert float(told.scores[0].abs().max()) <= 1e-5
    assert float(told.completeness.max()) <= 1e-5
    flow = lens.flow("the cat", target=("on a mat", "on a dog"), each=True)
    assert flow.each is not None
    assert float(flow.each.completeness.max()) <= 1e-5
    refused(lambda: lens.explain("the cat", answer="on a mat", against="on a mat"), "the same")


def test_hops_close_and_pass_every_token_on() -> None:
    told = speaker().explain("the cat", answer="on a mat the dog", hops=4, final="the dog")
    S, b = told.scores.double(), told.remainder.double()
    columns = {3: 0, 4: 1, 5: 2}  # the columns of the reasoning, and its rows
    scores, remainder, unexplained = S[3:].sum(0), float(b[3:].sum()), 0.0
    for hop in told.hops:
        torch.testing.assert_close(hop.scores, scores, rtol=1e-9, atol=1e-12)
        assert hop.remainder == pytest.approx(remainder)
        assert hop.unexplained == pytest.approx(unexplained)
        total = float(hop.scores.sum()) + hop.remainder + hop.unexplained
        assert total == pytest.approx(float(S[3:].sum() + b[3:].sum()), rel=1e-9)
        assert hop.on_reasoning == pytest.approx(float(sum(hop.scores[k] for k in columns)))
        following = scores.clone()
        for k, row in columns.items():
            weight, size = float(scores[k]), float(S[row].abs().sum() + b[row].abs())
            following[k] -= weight
            following += weight / size * S[row]
            remainder += weight / size * float(b[row])
            unexplained += weight - weight / size * float(S[row].sum() + b[row])
        scores = following
    assert told.hops[-1].on_reasoning == 0  # three reasoning tokens are passed after three hops
    assert len(told.hops) == 4


class Stop:
    """A progress callback that stops like Ctrl-C after some calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, done: int, total: int) -> None:
        assert 1 <= done <= total
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "exact_score_blocks", partial(exact_score_blocks, block_bytes=1))


@pytest.mark.usefixtures("one_at_a_time")
def test_stopping_returns_what_is_done() -> None:
    lens = speaker()
    whole = lens.explain("the cat", generate=5)
    with pytest.warns(match="Stopped after 2 of 5 tokens"):
        told = lens.explain("the cat", generate=5, progress=Stop(5 + lens.depth + 2))
    assert told.tokens == whole.tokens[:2]
    assert torch.equal(told.scores, whole.scores[:2])
    assert len(told.alternatives) == len(told.probabilities) == len(told.targets) == 2
    assert "Stopped" in told.warnings[0]
    for calls in (1, 5 + lens.depth):  # while the model writes, and while it is frozen
        with pytest.raises(KeyboardInterrupt):
            lens.explain("the cat", generate=5, progress=Stop(calls))


@pytest.mark.usefixtures("one_at_a_time")
def test_stopping_a_contrast_keeps_complete_rows() -> None:
    lens = speaker()
    whole = lens.explain("the cat", answer="on a mat", against="dog")
    with pytest.warns(match="Stopped"):
        told = lens.explain("the cat", answer="on a mat", against="dog", progress=Stop(lens.depth + 1 + lens.depth + 2))
    assert torch.equal(told.scores, whole.scores[: len(told.rows)])
    assert len(told.rows) < 3
    with pytest.raises(KeyboardInterrupt):
        lens.explain("the cat", answer="mat", against="on a dog", progress=Stop(lens.depth + 1))


def kinds() -> dict[str, Explanation]:
    lens = speaker()
    return {
        "plain": lens.explain("the cat", generate=3),
        "sources": lens.explain("what sat", sources=["the cat", "a <b>dog</b>"], generate=3),
        "answers": lens.explain("the cat", answer="on a mat", against="dog"),
        "hops": lens.explain("the cat", answer="on a mat the dog", hops=2, final="the dog"),
        "two sides": translator().explain("the cat sat", answer="le chat"),
    }


@pytest.mark.parametrize("kind", ["plain", "sources", "answers", "hops", "two sides"])
def test_round_trips_and_views(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told = kinds()[kind]
    loaded = Explanation.load(told.save(tmp_path / "told.safetensors"))
    for again in (loaded, pickle.loads(pickle.dumps(told)), copy.deepcopy(told)):
        assert repr(again) == repr(told)
        for name in ("answer", "rows", "columns", "targets", "alternatives", "sources", "texts", "tokens", "shares"):
            assert getattr(again, name) == getattr(told, name), name
        for name in ("scores", "values", "remainder", "completeness", "probabilities"):
            assert torch.equal(getattr(again, name), getattr(told, name)), name
        assert [hop.remainder for hop in again.hops] == [hop.remainder for hop in told.hops]
        assert all(torch.equal(a.scores, b.scores) for a, b in zip(again.hops, told.hops, strict=True))
    page = told.to_html(tmp_path / "told.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<b>dog" not in page
    assert "http" not in page.replace("http-equiv", "")
    shown = told._repr_mimebundle_()
    assert shown["text/plain"] == repr(told)
    axes = told.plot()
    assert told.plot(ax=axes.figure.subplots()) is not axes
    frame = pytest.importorskip("pandas") and told.to_pandas()
    assert len(frame) == told.scores.numel()
    assert frame["score"].sum() == pytest.approx(float(told.scores.double().sum()))
    (tmp_path / "bad.safetensors").write_bytes((tmp_path / "told.safetensors").read_bytes()[:-3])
    with pytest.raises(NormscopeError):
        Explanation.load(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ("exactly one of generate=",)),
        ({"generate": 2, "answer": "mat"}, ("exactly one",)),
        ({"generate": 0}, ("at least 1",)),
        ({"answer": " "}, ("non-empty",)),
        ({"answer": "zebra"}, ("not in the vocabulary",)),
        ({"target": "mat"}, ("slice of positions or a Passage", "flow()")),
        ({"target": slice(0, 2)}, ("position 0",)),
        ({"target": slice(2, 2)}, ("empty",)),
        ({"target": slice(2, 40)}, ("outside",)),
        ({"target": slice(2, 3), "against": "the dog"}, ("generate= or answer=",)),
        ({"generate": 2, "gate": "tangent"}, ("ig",)),
        ({"generate": 2, "against": 1.5}, ("against must be",)),
        ({"generate": 2, "against": True}, ("against must be",)),
        ({"generate": 2, "hops": -1}, ("hops",)),
        ({"generate": 2, "final": "mat"}, ("hops=",)),
        ({"answer": "on a mat", "hops": 1}, ("final=",)),
        ({"answer": "on a mat", "hops": 1, "final": "on"}, ("reasoning",)),
        ({"answer": "on a on", "hops": 1, "final": "on"}, ("2 times",)),
        ({"answer": "mat", "hops": 1, "final": "mat", "against": "dog"}, ("one answer",)),
        ({"generate": 2, "sources": {"a": (0, 5), "b": (4, 7)}}, ("overlap",)),
        ({"generate": 2, "sources": {"a": (0, 0)}}, ("empty",)),
        ({"generate": 2, "sources": ["the", " "]}, ("empty",)),
        ({"generate": 2, "template": "{sources}"}, ("sources",)),
    ],
)
def test_what_is_refused(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    refused(lambda: speaker().explain("the cat sat", **options), *parts)


def test_models_and_inputs_that_cannot_be_explained() -> None:
    refused(lambda: masked().explain("the cat", generate=2), "encoder")
    refused(lambda: masked().explain("the cat", target=slice(1, 2)), "left to right")
    refused(lambda: named_classifier().explain("the cat", target=slice(1, 2)), "classes")
    refused(lambda: toy_lens("llama").explain("the cat", generate=2), "no head")
    refused(lambda: toy_lens("gpt2").explain("the cat", target=slice(1, 2)), "no head")
    refused(lambda: toy_lens().explain(chat=[{"role": "user", "content": "the"}], generate=2), "chat template")
    lens, given, _, _ = open_case("gpt2", "CausalLM")
    positions = lens.loaded.limits.positions
    assert positions is not None
    refused(lambda: lens.explain({"input_ids": [5] * positions}, generate=2), f"positions for {positions}")
    refused(lambda: lens.explain(given, answer="mat"), "tokenizer")


def test_the_model_is_left_as_it_was() -> None:
    lens = speaker()
    before = state_of(lens.model)
    lens.explain("the cat", generate=3)
    assert state_of(lens.model) == before


@pytest.mark.parametrize("name", ["stories15M", "SmolLM2-135M-Instruct", "gemma3-270m"])
def test_a_real_model(name: str) -> None:
    folder = real_model(name)
    lens: Analyzer[Any] = Analyzer.from_pretrained(folder)
    question = "Lily had a red ball. Tom had a blue car. What did Lily have?"
    chat = getattr(lens.tokenizer, "chat_template", None)
    given: dict[str, Any] = {"chat": [{"role": "user", "content": question}]} if chat else {"prompt": question}
    told = lens.explain(**given, generate=8)
    assert float(told.completeness.max()) <= 1e-4
    assert sum(told.shares.values()) == pytest.approx(told.value, rel=1e-4)
    assert len(told.tokens) == len(told.scores) <= 8


def test_tokens_of_spaces_belong_to_the_text_after_them() -> None:
    pieces = ["<s>", "a", ".", " ", "b", "\n", "\n", "c", " ", "</s>", " ", "d", "\n"]
    spans, at = [], 0
    for piece in pieces:
        spans.append((at, at + (0 if "s>" in piece else len(piece))))
        at = spans[-1][1]
    text = "".join(piece for piece in pieces if "s>" not in piece)
    labels = [Label(piece, "decoder", n) for n, piece in enumerate(pieces)]
    one = SpelledText(text, tuple(spans), answer=spans[10][0])
    found = group_tokens(labels, {"decoder": one}, "sentence")
    assert [(group.name, group.places) for group in found] == [
        ("<s>", (0,)),
        ("a.", (1, 2)),
        ("b", (3, 4)),
        ("c ", (5, 6, 7, 8)),
        ("</s>", (9,)),
        ("d", (10, 11, 12)),
    ]


def test_the_frames_of_a_sound() -> None:
    """Words of 0.1 s and sentences of 0.5 s, of 20 ms each."""
    model = tiny("whisper", "Seq2SeqLM", max_source_positions=60)
    lens = Analyzer(model)
    features = torch.randn(1, model.config.num_mel_bins, 120, dtype=torch.float64)
    told = lens.explain({"input_features": features}, generate=2)
    frames = len(told.columns) - len(told.rows) - 1
    assert frames == 60
    seconds = [one.name for one in told.grouped(inputs="sentence").columns if one.name.endswith("s")]
    assert seconds == ["0.00s to 0.48s", "0.50s to 0.98s", "1.00s to 1.18s"]
    for grain, count in (("word", 12), ("sentence", 3), ("line", 1)):
        found = told.grouped(inputs=grain)
        places = [one.places for one in found.columns if told.columns[one.places[0]].side == "encoder"]
        assert len(places) == count
        assert float(found.scores.sum()) == pytest.approx(float(told.scores.sum()), rel=1e-9)


@pytest.mark.parametrize("sources", [None, ["the cat", "a dog", "on", "a mat", "the mat", "the dog"]])
def test_what_views_list_adds_up(sources: Any) -> None:
    told = speaker().explain("what sat", sources=sources, generate=5)
    for sentence in explained_sentences(told):
        assert sum(part.score for part in sentence.parts) == pytest.approx(sentence.value, rel=1e-9)
        assert sentence.value == pytest.approx(float(told.values[list(sentence.tokens)].sum()), rel=1e-6)
    parts = explained_parts(told, "word")
    torch.testing.assert_close(parts.scores.sum(-1), told.values, rtol=1e-5, atol=1e-6)
    assert [one.name for one in parts.columns][-3:] == ["(answer)", "(first token)", "(no input)"]
    for scores, listed in zip(parts.scores, explained_tokens(told), strict=True):
        assert not sources or abs(listed[0].score) == pytest.approx(float(scores.abs().max()))


def test_the_whole_page_shows_what_each_token_rests_on(tmp_path: Path) -> None:
    told = speaker().explain("what sat", sources={"one": "the cat", "other": "a mat"}, generate=3)
    page = told.to_html(tmp_path / "told.html").read_text(encoding="utf-8")
    for listed in explained_tokens(told):
        assert f"<bdi>{listed[0].name}</bdi> {listed[0].score:+.3g}" in page
