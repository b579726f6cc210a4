"""Sources: spans, templates, chats and grains as groups of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from normscope import Analyzer, NormscopeError
from normscope.inputs.encode import encode_one
from normscope.inputs.item import Item
from normscope.inputs.marked_text import mark_text
from normscope.inputs.sources import locate_sources, sum_by_source
from tests.helpers.tiny import inputs, tiny
from tests.helpers.toys import TEXT, causal, letters_tokenizer, seer, speaker, toy_lens, translator, word_tokenizer


def read(lens: Analyzer, text: Any = None, **given: Any) -> Item:
    names = ("words", "chat", "text_target", "generate")
    plain = [given.pop(name, None) for name in names]
    return encode_one(lens.loaded, text, *plain, given.pop("truncation", False), **given)


def groups(item: Item, side: str | None = None) -> dict[str, list[str]]:
    """The tokens of each source on one side, the rest last."""
    assert item.sources is not None
    side = side or next(iter(item.sides))
    names = (*item.sources.names, "(rest)")
    found: dict[str, list[str]] = {name: [] for name in names}
    for token, source in zip(item.sides[side].names, item.sources.index[side].tolist(), strict=True):
        found[names[source]].append(token)
    return found


def marked(text: str | None, sources: Any, template: str | None = None) -> dict[str, str]:
    """The text of each source, cut out of the whole text."""
    found = mark_text(text, sources, template)
    return {name: found.text[start:stop] for name, (start, stop) in found.spans.items()}


def test_spans_are_groups_of_tokens() -> None:
    item = read(toy_lens(), TEXT, sources={"end": (16, 31), "cats": (0, 8)})
    assert groups(item) == {
        "end": ["the", "big", "red", "mat"],
        "cats": ["the", "cat", "##s"],
        "(rest)": ["[CLS]", "sat", "on", "[SEP]"],
    }


def test_a_token_belongs_to_the_source_of_its_first_character() -> None:
    halves = read(toy_lens(), TEXT, sources={"left": (0, 6), "right": (6, 31)})  # the ca|ts sat ...
    assert groups(halves)["left"] == ["the", "cat"]
    spaced = read(toy_lens(), TEXT, sources={"left": (0, 8), "right": (8, 31)})  # right starts with a space
    assert groups(spaced)["right"][0] == "sat"


def space_first_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte-level tokens that include the space before a word."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = [piece for piece, _ in level.pre_tokenize_str(text)]
    backend = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(["<unk>", *pieces])}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_a_space_before_a_word_does_not_decide() -> None:
    text = "one two\n\nthree"
    lens = Analyzer(tiny("llama"), space_first_tokenizer(text))
    item = read(lens, text, sources={"first": (0, 4), "second": (4, 7), "third": (9, 14)})
    assert item.sides["decoder"].spans == ((0, 3), (3, 7), (7, 8), (8, 9), (9, 14))
    assert groups(item) == {"first": ["one"], "second": ["Ġtwo"], "third": ["three"], "(rest)": ["Ċ", "Ċ"]}


def test_texts_joined_by_a_template() -> None:
    assert marked("Who?", ["Ann sat.", "Bob ran."]) == {
        "source 1": "Ann sat.",
        "source 2": "Bob ran.",
        "question": "Who?",
    }
    assert mark_text("Who?", ["Ann sat.", "Bob ran."], None).text == "Ann sat.\n\nBob ran.\n\nWho?"
    assert mark_text(None, {"a": "Ann sat."}, None).text == "Ann sat."
    mixed = mark_text("Who?", {"a": "Ann.", "b": "Bob."}, "{{}}{1} or {a}: {question}!")
    assert mixed.text == "{}Bob. or Ann.: Who?!"
    assert marked("Who?", {"a": "Ann.", "b": "Bob."}, "{{}}{1} or {a}: {question}!") == {
        "a": "Ann.",
        "b": "Bob.",
        "question": "Who?",
    }


def test_the_tokens_of_the_template_are_the_rest() -> None:
    item = read(toy_lens(), "the dog", sources=["the cat sat", "a mat"], template="{sources} and it was {question}")
    assert groups(item) == {
        "source 1": ["the", "cat", "sat"],
        "source 2": ["a", "mat"],
        "question": ["the", "dog"],
        "(rest)": ["[CLS]", "and", "it", "was", "[SEP]"],
    }


QUOTED = 'He said "Go." Then\u2026 no!  Yes?\n\nthe end \u4f60\u597d\u3002\u518d\u89c1\uff01 the'


@pytest.mark.parametrize(
    ("grain", "expected"),
    [
        ("line", ['He said "Go." Then\u2026 no! Yes?', "the end \u4f60\u597d\u3002\u518d\u89c1\uff01 the"]),
        (
            "sentence",
            ['He said "Go."', "Then\u2026", "no!", "Yes?", "the end \u4f60\u597d\u3002", "\u518d\u89c1\uff01", "the"],
        ),
        (
            "word",
            [
                "He",
                "said",
                '"Go."',
                "Then\u2026",
                "no!",
                "Yes?",
                "the",
                "end",
                "\u4f60\u597d\u3002\u518d\u89c1\uff01",
                "the (2)",
            ],
        ),
    ],
)
def test_grains(grain: str, expected: list[str]) -> None:
    assert list(marked(QUOTED, grain)) == expected


def test_words_and_tokens_as_sources() -> None:
    words = groups(read(toy_lens(), TEXT, sources="word"))
    assert words["cats"] == ["cat", "##s"]
    assert words["the (2)"] == ["the"]
    assert words["(rest)"] == ["[CLS]", "[SEP]"]
    tokens = groups(read(toy_lens(), {"input_ids": [2, 6, 6, 3], "attention_mask": [1, 1, 0, 1]}, sources="token"))
    assert tokens == {"[CLS]": ["[CLS]"], "the": ["the"], "[SEP]": ["[SEP]"], "(rest)": ["the"]}  # masked: no column


def test_truncation_drops_words_but_no_named_source() -> None:
    lens = Analyzer(tiny("bert", max_position_embeddings=6), toy_lens().tokenizer)
    cut = read(lens, TEXT, sources="word", truncation=True)
    assert list(groups(cut)) == ["the", "cats", "sat", "(rest)"]
    with pytest.raises(NormscopeError, match="No token is left of the source 'end': it was truncated"):
        read(lens, TEXT, sources={"start": (0, 3), "end": (28, 31)}, truncation=True)


def test_messages_of_a_chat() -> None:
    chat = [
        {"role": "user", "content": "the cat sat"},
        {"role": "assistant", "content": "on a mat"},
        {"role": "user", "content": "the dog"},
    ]
    item = read(speaker(), chat=chat, sources="message")
    assert groups(item) == {
        "user 1": ["the", "cat", "sat"],
        "assistant": ["on", "a", "mat"],
        "user 2": ["the", "dog"],
        "(rest)": [
            "<s>",
            "user",
            ":",
            "</s>",
            "<s>",
            "assistant",
            ":",
            "</s>",
            "<s>",
            "user",
            ":",
            "</s>",
            "<s>",
            "assistant",
            ":",
        ],
    }
    words = read(speaker(), chat=chat[2:], sources="word")
    assert {name: len(tokens) for name, tokens in groups(words).items()} == {"the": 1, "dog": 1, "(rest)": 7}


def test_a_message_that_spells_like_the_template() -> None:
    item = read(speaker(), chat=[{"role": "user", "content": "user : the"}], sources="message")
    assert groups(item)["user"] == ["user", ":", "the"]
    assert groups(item)["(rest)"][:3] == ["<s>", "user", ":"]


def test_sources_join_the_last_message_of_the_user() -> None:
    chat = [{"role": "user", "content": "the dog"}]
    item = read(speaker(), chat=chat, sources={"a": "the cat sat", "b": "a mat"}, template="{b} on {a} ran {question}")
    found = groups(item)
    assert found["a"] == ["the", "cat", "sat"]
    assert found["b"] == ["a", "mat"]
    assert found["question"] == ["the", "dog"]
    assert found["(rest)"] == ["<s>", "user", ":", "on", "ran", "</s>", "<s>", "assistant", ":"]


@pytest.mark.parametrize("content", ["{{ turn['content'] | trim }}", "{{ turn['content'] }}"])
def test_templates_that_trim_messages(content: str) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %} the " + content + " on {% endfor %}"
    lens = Analyzer(tiny("llama", "CausalLM"), tokenizer)
    chat = [{"role": "user", "content": "  cat sat \n"}]
    assert groups(read(lens, chat=chat, sources="message"))["user"] == ["cat", "sat"]
    found = groups(read(lens, chat=chat, sources=[" a mat"], template="{0}{question}"))
    assert found == {"source 1": ["a", "mat"], "question": ["cat", "sat"], "(rest)": ["the", "on"]}


def test_a_template_that_changes_messages_is_refused() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] | upper }}{% endfor %}"
    lens = Analyzer(tiny("llama", "CausalLM"), tokenizer)
    with pytest.raises(NormscopeError, match="changes or reorders the messages"):
        read(lens, chat=[{"role": "user", "content": "the cat"}], sources="message")


def test_generated_tokens_are_the_answer() -> None:
    item = read(speaker(), "the cat", generate=3, sources={"cat": (4, 7)})
    names = item.sides["decoder"].names
    found = groups(item)
    assert found["cat"] == ["cat"]
    assert found["(answer)"] == [name for name in names[3:] if name not in ("<s>", "</s>")]
    assert found["(answer)"]


def test_an_encoder_decoder_reads_sources_and_writes_the_answer() -> None:
    for given in ({"text": "the cat sat", "text_target": "le chat"}, {"text": ("the cat sat", "le chat")}):
        item = read(translator(), **given, sources={"cat": (4, 7)})
        assert groups(item, "encoder") == {"cat": ["cat"], "(answer)": [], "(rest)": ["the", "sat", "</s>"]}
        assert groups(item, "decoder") == {"cat": [], "(answer)": ["le", "chat"], "(rest)": ["<s>"]}


def test_columns_by_side_and_position() -> None:
    sources = read(translator(), ("the cat sat", "le chat"), sources={"cat": (4, 7)}).sources
    assert sources is not None
    places = [("decoder", 1), ("encoder", 1), ("prompt", 0), ("encoder", 0)]
    assert sources.columns(places).tolist() == [1, 0, -1, -1]


def test_scores_add_up_by_source() -> None:
    scores = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = sum_by_source(scores, torch.tensor([0, -1, 2, 0, -1, 2]), 3)
    expected = [
        scores[..., [0, 3]].sum(-1),
        torch.zeros(2, 3),
        scores[..., [2, 5]].sum(-1),
        scores[..., [1, 4]].sum(-1),
    ]
    assert torch.allclose(found, torch.stack([one.double() for one in expected], -1), rtol=1e-12)
    assert torch.allclose(found.sum(-1), scores.sum(-1), rtol=1e-12)
    with pytest.raises(NormscopeError, match="6 scores for 2 columns"):
        sum_by_source(scores, torch.tensor([0, 1]), 2)


def without_offsets(item: Item, names: Sequence[str]) -> Item:
    """The item as a slow tokenizer would give it, with other spellings of its tokens."""
    tokens = replace(item.sides["encoder"], names=tuple(names), spans=None)
    return replace(item, sides={"encoder": tokens})


def test_tokens_without_offsets_are_aligned() -> None:
    item = read(toy_lens(), "the ca\ufb01 sat")  # 5 tokens
    text = mark_text("The ca\ufb01 sat\u2026", {"a": (0, 3), "b": (4, 7), "c": (8, 12)}, None)
    spelled = without_offsets(item, ["[CLS]", "\u2581the", "\u2581cafi", "\u2581sat...", "[SEP]"])
    assert groups(replace(spelled, sources=locate_sources(spelled, text, "encoder", toy_lens().tokenizer))) == {
        "a": ["\u2581the"],
        "b": ["\u2581cafi"],
        "c": ["\u2581sat..."],
        "(rest)": ["[CLS]", "[SEP]"],
    }
    for wrong in ("\u2581dog", "[UNK]"):
        other = without_offsets(item, ["[CLS]", "\u2581the", wrong, "\u2581sat", "[SEP]"])
        with pytest.raises(NormscopeError, match="cannot be found there"):
            locate_sources(other, text, "encoder", toy_lens().tokenizer)


SPANS: dict[str, Any] = {"a": (0, 3)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sources": {"a": (0, 40)}}, "The span 0 to 40 of 'a' is outside the text, which has 31 characters"),
        ({"sources": {"a": (-3, 4)}}, "outside the text"),
        ({"sources": {"a": (7, 4)}}, "outside the text"),
        ({"sources": {"a": (3, 3)}}, "The span 3 to 3 of 'a' is empty"),
        ({"sources": {"a": (3, 4)}}, "holds no character but spaces"),
        ({"sources": {"a": (0, 9), "b": (12, 14), "c": (8, 11)}}, r"'a' \(0 to 9\) and 'c' \(8 to 11\) overlap"),
        ({"sources": {"a": (5, 6)}}, "No token is left of the source 'a'"),
        ({"sources": {"a": (0, 1, 2)}}, r"must be two integers \(start, stop\)"),
        ({"sources": {"a": (True, 2)}}, "must be two integers"),
        ({"sources": {"a": 5}}, "must be two integers"),
        ({"sources": {"a": (0.0, 2.0)}}, "must be two integers"),
        ({"sources": {"": (0, 3)}}, "The name of a source must be a non-empty string"),
        ({"sources": {1: (0, 3)}}, "The name of a source must be a non-empty string"),
        ({"sources": {"(rest)": (0, 3)}}, "name of tokens of no source"),
        ({"sources": {}}, "sources is empty"),
        ({"sources": 5}, "sources must be a dict of spans"),
        ({"sources": "words"}, "Unknown sources 'words'. Did you mean 'word'?"),
        ({"sources": "message"}, r"needs chat=\[...\]"),
        ({"sources": {"question": "the cat"}}, "Two sources are named 'question'"),
        ({"sources": {"a": "the cat", "b": (0, 3)}}, "Either all sources are texts or all are spans"),
        ({"sources": ["the cat", " "]}, "The source 'source 2' is empty"),
        ({"sources": ["the cat"], "text": " "}, "The text besides the sources must be a non-empty string"),
        ({"sources": ["the cat"], "template": "{0}"}, "The template leaves out 'question'"),
        ({"sources": ["a", "the"], "template": "{0} {question}"}, "The template leaves out 'source 2'"),
        ({"sources": ["a"], "template": "{0} {sources} {question}"}, "has the source 'source 1' twice"),
        ({"sources": ["a"], "template": "{1} {question}"}, "unknown field {1}"),
        ({"sources": ["a"], "template": "{sources!r} {question}"}, "unknown field {sources!r}"),
        ({"sources": ["a"], "template": "{0"}, "The template is not valid"),
        ({"sources": ["a"], "template": 5}, "A template is a text"),
        ({"sources": SPANS, "template": "{0}"}, "nothing to join with spans"),
        ({"sources": "word", "template": "{0}"}, "nothing to join with sources='word'"),
        ({"sources": "token", "template": "{0}"}, "nothing to join with sources='token'"),
        ({"template": "{0}"}, "pass them too"),
        ({"sources": SPANS, "text": None}, "Spans are of a text"),
        ({"sources": SPANS, "text": None, "words": ["the", "cat"]}, r"not of words=\[...\]"),
        ({"sources": SPANS, "text": ("the cat", "a dog")}, "not of a pair"),
        ({"sources": SPANS, "text": {"input_ids": [2, 6, 3]}}, "not of dict"),
        ({"sources": SPANS, "chat": [{"role": "user", "content": "the"}]}, "Pass exactly one input"),
    ],
)
def test_bad_sources(given: dict[str, Any], message: str) -> None:
    with pytest.raises(NormscopeError, match=message):
        read(toy_lens(), **{"text": TEXT} | given)


def test_bad_sources_of_a_chat() -> None:
    turns = [{"role": "assistant", "content": "the"}]
    for sources, message in (
        (["a"], "the last message of the user"),
        ("wrd", "Unknown sources"),
        (5, "must be a dict"),
    ):
        with pytest.raises(NormscopeError, match=message):
            read(speaker(), chat=turns, sources=sources)
    with pytest.raises(NormscopeError, match="non-empty texts"):
        read(speaker(), chat=[{"role": "user", "content": ""}], sources="message")
    with pytest.raises(NormscopeError, match="has no chat template"):
        read(causal(), chat=turns, sources="message")


def test_sources_of_what_is_no_text() -> None:
    whisper = tiny("whisper")
    for lens, given in ((seer(), None), (Analyzer(whisper), inputs("whisper", whisper))):
        with pytest.raises(NormscopeError, match="Sources are parts of a text"):
            read(lens, given, sources="token")


def test_letters_that_repeat_have_names_of_their_own() -> None:
    lens = Analyzer(tiny("bert", vocab_size=80), letters_tokenizer())
    assert list(groups(read(lens, "aa a", sources="token"))) == ["[CLS]", "a", "##a", "a (2)", "[SEP]", "(rest)"]
