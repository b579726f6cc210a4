"""Generated continuations, chats, source and target of encoder-decoders, pictures and sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BartForCausalLM, PreTrainedModel, T5EncoderModel

from normscope import Analyzer, NormscopeError
from tests.helpers.compare import assert_same, assert_same_sides, refused, state_of
from tests.helpers.tiny import inputs, tiny
from tests.helpers.toys import PROMPT, SOURCE, TARGET, VOCABULARY, picture, seer, speaker, translator, word_tokenizer


def ids_of(*words: str) -> list[int]:
    return [VOCABULARY.index(word) for word in words]


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: list[int], count: int, key: str = "input_ids", **others: Tensor) -> list[int]:
    """The likeliest tokens one after the other, by whole forward passes."""
    grown = list(ids)
    for _ in range(count):
        logits = model(**{key: torch.tensor([grown])}, **others).logits
        grown.append(int(logits[0, -1].argmax()))
        if grown[-1] == 2:
            break
    return grown[len(ids) :]


# --- causal language models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "opt"])
def test_own_continuation(name: str) -> None:
    lens = speaker(name)
    prompt = ids_of("<s>", *PROMPT.split())
    new = greedy(lens.model, prompt, 3)
    result = lens.analyze(PROMPT, generate=3)
    assert result.tokens == tuple(lens.tokenizer.convert_ids_to_tokens(prompt + new))
    assert result.tokens[: len(prompt)] == lens.analyze(PROMPT).tokens
    assert_same(result, lens.analyze({"input_ids": prompt + new}), 1e-12)
    assert result.word_ids is None or result.word_ids[len(prompt) :] == (None,) * len(new)


def test_own_continuation_of_an_encoding() -> None:
    lens = Analyzer(speaker().model)
    prompt = [7, 30, 12, 45]
    new = greedy(lens.model, prompt, 3)
    result = lens.analyze({"input_ids": prompt}, generate=3, rows=[-1], heads=True)
    assert [label.token for label in result.columns] == [str(n) for n in prompt + new]
    assert_same(result, lens.analyze({"input_ids": prompt + new}, rows=[-1], heads=True), 1e-12)


def test_padding_before_a_continuation_is_gone() -> None:
    lens = speaker()
    prompt = [7, 30, 12, 45]
    padded = {"input_ids": [0, 0, *prompt], "attention_mask": [0, 0, 1, 1, 1, 1]}
    assert_same(lens.analyze(padded, generate=3), lens.analyze({"input_ids": prompt}, generate=3), 1e-12)


def test_positions_of_a_continuation_are_those_of_the_prompt() -> None:
    """Positions that were given stay, or are refused; they are not dropped."""
    lens = speaker()
    given = {"input_ids": [7, 30, 12], "position_ids": [3, 9, 11]}
    alone = lens.analyze(given, scopes="layer")
    try:
        grown = lens.analyze(given, scopes="layer", generate=1)
    except NormscopeError:
        return
    torch.testing.assert_close(grown["layer"][:, :3, :3], alone["layer"], rtol=1e-6, atol=1e-6)


def test_generation_stops_at_the_end_token() -> None:
    model = tiny("llama", "CausalLM")
    first = greedy(model, [7, 30, 12], 1)[0]
    model.generation_config.eos_token_id = first
    result = Analyzer(model).analyze({"input_ids": [7, 30, 12]}, generate=8)
    assert result.tokens == ("7", "30", "12", str(first))


def test_generation_is_greedy_and_leaves_the_model_alone() -> None:
    model = tiny("llama", "CausalLM")
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0
    before, settings = state_of(model), model.generation_config.to_dict()
    random = torch.random.get_rng_state()
    lens = Analyzer(model)
    first, second = (lens.analyze({"input_ids": [7, 30, 12]}, generate=5) for _ in range(2))
    assert first.tokens == second.tokens
    assert list(map(int, first.tokens[3:])) == greedy(model, [7, 30, 12], 5)
    assert state_of(model) == before
    assert model.generation_config.to_dict() == settings
    assert torch.equal(torch.random.get_rng_state(), random)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "3"])
def test_not_a_number_of_tokens(count: Any) -> None:
    refused(lambda: speaker().analyze(PROMPT, generate=count), "generate", repr(count))


def test_too_long_a_continuation() -> None:
    lens = speaker()
    with pytest.warns(
        UserWarning, match=r"34 generated tokens .* 41 tokens, more than the 40"
    ):  # its positions are computed
        result = lens.analyze(PROMPT, generate=34, scopes="weights", layers=[0])
    assert "41 tokens, more than the 40" in result.info["warnings"][0]
    assert len(lens.analyze(PROMPT, generate=33, scopes="weights", layers=[0]).tokens) <= 40
    learned = Analyzer(tiny("gpt2", "CausalLM"), word_tokenizer())
    count = 41 - len(learned.analyze(PROMPT, scopes="weights", layers=[0]).tokens)
    refused(lambda: learned.analyze(PROMPT, generate=count), str(count), "41 tokens", "positions for 40")


def test_model_without_a_head() -> None:
    lens = speaker()
    refused(lambda: Analyzer(lens.loaded.base, lens.tokenizer).analyze(PROMPT, generate=2), "LlamaModel", "CausalLM")


@pytest.mark.parametrize("head", [None, "MaskedLM"])
def test_an_encoder_does_not_generate(head: str | None) -> None:
    lens = Analyzer(tiny("modernbert", head), word_tokenizer())
    refused(lambda: lens.analyze(PROMPT, generate=2), "encoder", "generate")


# --- chats -----------------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "user", "content": "the cat sat"},
    {"role": "assistant", "content": "on a mat"},
    {"role": "user", "content": "a dog"},
]


def test_chat() -> None:
    lens = speaker()
    result = lens.analyze(chat=CHAT)
    said = "<s> user : the cat sat </s> <s> assistant : on a mat </s> <s> user : a dog </s> <s> assistant :"
    assert result.tokens == tuple(said.split())
    assert_same(result, lens.analyze({"input_ids": ids_of(*said.split())}), 1e-12)
    answered = lens.analyze(chat=CHAT, generate=3)
    assert answered.tokens[: len(result.tokens)] == result.tokens
    new = greedy(lens.model, ids_of(*said.split()), 3)
    assert ids_of(*answered.tokens[len(result.tokens) :]) == new


def test_chat_that_ends_with_the_model() -> None:
    """No prompt for another turn is added if the last one is the model's."""
    assert speaker().analyze(chat=CHAT[:2]).tokens[-4:] == ("on", "a", "mat", "</s>")


@pytest.mark.parametrize(
    "chat", [[], "hello", ["hello"], {"role": "user", "content": "a cat"}, 5, [None]], ids=lambda chat: str(chat)[:20]
)
def test_not_a_chat(chat: Any) -> None:
    refused(lambda: speaker().analyze(chat=chat), "chat", "role")


def test_chat_that_the_template_refuses() -> None:
    refused(lambda: speaker().analyze(chat=[{"role": "system", "content": "a"}]), "no system turns")


def test_chat_needs_a_template() -> None:
    model = speaker().model
    for tokenizer in (word_tokenizer(), None):
        refused(lambda tokenizer=tokenizer: Analyzer(model, tokenizer).analyze(chat=CHAT), "chat template")


def test_chat_and_a_text() -> None:
    refused(lambda: speaker().analyze(PROMPT, chat=CHAT), "Pass exactly one input")


# --- encoder-decoders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_teacher_forcing(name: str) -> None:
    """The decoder reads the start token and all of the target but its last token, which it only writes."""
    lens = translator(name)
    start = lens.model.config.decoder_start_token_id
    by_hand = {
        "input_ids": ids_of(*SOURCE.split(), "</s>"),
        "decoder_input_ids": [start, *ids_of(*TARGET.split())],
    }
    result = lens.analyze((SOURCE, TARGET), heads=True)
    assert result.encoder.tokens == (*SOURCE.split(), "</s>")
    assert result.decoder.tokens == (VOCABULARY[start], *TARGET.split())
    assert [(label.token, label.side) for label in result.decoder.columns] == [
        *((token, "decoder") for token in result.decoder.tokens),
        *((token, "encoder") for token in result.encoder.tokens),
    ]
    for other in (
        lens.analyze(SOURCE, text_target=TARGET, heads=True),
        lens.analyze(by_hand, heads=True),
        lens.analyze(by_hand | {"decoder_attention_mask": [1] * 6}, heads=True),
        lens.analyze(SOURCE, text_target={"input_ids": by_hand["decoder_input_ids"]}, heads=True),
        lens.analyze(words=SOURCE.split(), text_target=TARGET, heads=True),
    ):
        assert_same_sides(other, result, 1e-12)
    assert result.cross("layer").shape == (2, 6, 4)


@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_generated_answer(name: str) -> None:
    """The same as a hand-written greedy loop; the end token is written, not read."""
    lens = translator(name)
    start = lens.model.config.decoder_start_token_id
    source = ids_of(*SOURCE.split(), "</s>")
    written = greedy(lens.model, [start], 4, "decoder_input_ids", input_ids=torch.tensor([source]))
    result = lens.analyze(SOURCE, generate=5)
    assert ids_of(*result.decoder.tokens)[: 1 + len(written)] == [start, *written]
    assert "</s>" not in result.decoder.tokens[1:]
    forced = lens.analyze({"input_ids": source, "decoder_input_ids": [start, *written]})
    n = min(5, len(forced.decoder.rows))
    for scope in result.decoder.scopes:
        torch.testing.assert_close(
            result.cross(scope)[:, :n], forced.cross(scope)[:, :n], rtol=1e-5, atol=1e-6
        )  # causal: what follows changes nothing
    assert len(lens.analyze(SOURCE, scopes="weights").decoder.rows) <= 65


def test_generated_answer_to_audio() -> None:
    """The decoder reads the start token first, which Whisper's generate() does not return."""
    model = tiny("whisper", "Seq2SeqLM")
    features = inputs("whisper", model)["input_features"]
    start = model.config.decoder_start_token_id
    written = greedy(model, [start], 3, "decoder_input_ids", input_features=features)
    result = Analyzer(model).analyze({"input_features": features}, generate=3)
    assert list(map(int, result.decoder.tokens)) == [start, *written[:-1]]  # the last one is only written


def test_stream_of_pairs() -> None:
    lens = translator()
    given = [(SOURCE, TARGET), ("a dog", "un chien"), ("the cat sat on the mat", "le chat"), (SOURCE, "un")]
    for batch_size in (1, 3, 16):
        for one, result in zip(given, lens.stream(given, batch_size=batch_size, heads=True), strict=True):
            assert_same_sides(result, lens.analyze(one, heads=True), 1e-11)
    own = [SOURCE, "a dog"]  # without a target each is answered
    for one, result in zip(own, lens.stream(own), strict=True):
        assert_same_sides(result, lens.analyze(one), 1e-11)


def test_encoding_of_several_pairs() -> None:
    lens = translator()
    given = {
        "input_ids": [[8, 9, 10], [7, 9, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "decoder_input_ids": [[1, 0, 0], [1, 16, 17]],
        "decoder_attention_mask": [[1, 0, 0], [1, 1, 1]],
    }
    first, second = lens.stream(given)
    assert_same_sides(first, lens.analyze({"input_ids": [8, 9, 10], "decoder_input_ids": [1]}), 1e-11)
    assert_same_sides(second, lens.analyze({"input_ids": [7, 9], "decoder_input_ids": [1, 16, 17]}), 1e-11)


def test_wrong_sources_and_targets() -> None:
    lens = translator()
    base = Analyzer(lens.loaded.base, lens.tokenizer)
    refused(lambda: base.analyze(SOURCE), "BartModel", "target")
    assert_same_sides(base.analyze((SOURCE, TARGET)), lens.analyze((SOURCE, TARGET)), 1e-12)
    refused(lambda: lens.analyze({"decoder_input_ids": [1, 5]}), "input_ids")
    refused(
        lambda: lens.analyze({"input_ids": [5, 6], "decoder_input_ids": [[1, 2], [1, 3]]}), "1 sources", "2 targets"
    )
    refused(lambda: lens.analyze({"input_ids": [5, 6], "decoder_input_ids": [1, 99]}), "99", "vocabulary")
    refused(lambda: lens.analyze({"input_ids": [5, 6], "decoder_input_ids": []}), "empty")
    refused(lambda: lens.analyze((SOURCE, "")), "target")
    refused(lambda: lens.analyze((SOURCE, 5)), "target")
    refused(lambda: lens.analyze(("", TARGET)), "empty")
    refused(lambda: lens.analyze((SOURCE, TARGET, TARGET)), "3 texts", "(a, b)", "words=[...]")
    refused(lambda: lens.analyze((SOURCE, TARGET), text_target=TARGET), "already", "text_target")
    refused(lambda: lens.analyze((SOURCE,), text_target=TARGET), "one text", "(a, b)", "words=[...]")
    refused(lambda: lens.analyze(SOURCE, text_target=TARGET, generate=3), "target", "generate")
    refused(lambda: lens.analyze((SOURCE, " ".join(["chat"] * 50))), "51 tokens", "40")
    assert len(lens.analyze((SOURCE, " ".join(["chat"] * 50)), truncation=True, scopes="weights").decoder.rows) == 40
    refused(lambda: lens.analyze(SOURCE, generate=0), "generate")
    refused(lambda: Analyzer(lens.model).analyze({"input_ids": [5, 6]}, text_target=TARGET), "tokenizer")


def test_target_and_number_of_tokens_in_one_encoding() -> None:
    """As with a target text: one or the other."""
    given = {"input_ids": [5, 6], "decoder_input_ids": [1, 7]}
    refused(lambda: translator().analyze(given, generate=3), "generate")


@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_target_for_a_model_of_one_side(name: str) -> None:
    lens = Analyzer(tiny(name), word_tokenizer())
    refused(lambda: lens.analyze(PROMPT, text_target=TARGET), "target", "encoder-decoder")
    refused(lambda: lens.analyze({"input_ids": [5], "decoder_input_ids": [1]}), "decoder_input_ids")


# --- heads and layers of two sides -----------------------------------------------------------------------------------


def test_all_heads_of_stacks_of_unequal_width() -> None:
    model = tiny("bart", decoder_attention_heads=2)
    result = Analyzer(model).analyze(inputs("bart", model), heads=True)
    assert result.encoder.heads["ATTN-W"].shape[1] == 4
    assert result.decoder.heads["ATTN-W"].shape[1] == 2


# --- pictures --------------------------------------------------------------------------------------------------------


def test_array() -> None:
    lens = seer()
    result = lens.analyze(picture())
    assert result.info["grid"] == [3, 3]
    assert result.tokens == ("[CLS]", *(f"{row},{column}" for row in (1, 2, 3) for column in (1, 2, 3)))
    pixels = lens.tokenizer(images=picture(), return_tensors="pt")["pixel_values"]
    assert_same(result, lens.analyze({"pixel_values": pixels}), 1e-12)
    assert_same(result, lens.analyze({"pixel_values": pixels[0]}), 1e-12)
    assert not torch.allclose(result["layer"], lens.analyze(255 - picture())["layer"])


def test_pil_image_and_path(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is missing")
    lens = seer()
    expected = lens.analyze(picture())
    assert_same(lens.analyze(image.fromarray(picture())), expected, 1e-12)
    path = tmp_path / "picture.png"
    image.fromarray(picture()).save(path)
    assert_same(lens.analyze(path), expected, 1e-12)
    assert_same(lens.analyze(str(path)), expected, 1e-12)
    grey = image.fromarray(picture()[:, :, 0])
    assert_same(lens.analyze(grey), lens.analyze(grey.convert("RGB")), 1e-12)
    broken = tmp_path / "broken.png"
    broken.write_bytes(path.read_bytes()[:60])
    refused(lambda: lens.analyze(broken), "broken.png")
    (tmp_path / "text.png").write_text("no picture")
    refused(lambda: lens.analyze(tmp_path / "text.png"), "text.png")


def test_pictures_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "large.png"
    image.fromarray(picture()).save(path)
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 20)
    refused(lambda: seer().analyze(path), "large.png", "pixels")


def test_stream_of_pictures() -> None:
    lens = seer("dinov2")  # takes any size
    pixels = [
        torch.randn(3, *size, generator=torch.Generator().manual_seed(0)) for size in ((12, 12), (16, 8), (12, 12))
    ]
    given = [picture(), *({"pixel_values": one} for one in pixels), picture(40, 40)]
    results = list(lens.stream(given, batch_size=2))
    assert [result.info["grid"] for result in results] == [[3, 3], [3, 3], [4, 2], [3, 3], [3, 3]]
    for one, result in zip(given, results, strict=True):
        assert_same(result, lens.analyze(one), 1e-11)


def test_patches_at_the_edge_that_are_cut_off() -> None:
    assert Analyzer(tiny("dinov2")).analyze({"pixel_values": torch.randn(3, 17, 9)}).info["grid"] == [4, 2]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("a text about a cat", "vision model"),
        (("a", "b"), "vision model"),
        (5, "vision model"),
        (np.zeros((4, 4)), "vision model"),
        ({"input_ids": [5, 6]}, "pixel_values"),
        ({"pixel_values": torch.zeros(3, 16, 8)}, "16"),
        ({"pixel_values": torch.zeros(3, 2, 2)}, "smaller than a patch"),
        ({"pixel_values": torch.zeros(1, 12, 12)}, "channels"),
        ({"pixel_values": torch.zeros(12, 12)}, "dimensions"),
        ({"pixel_values": torch.full((3, 12, 12), float("nan"))}, "NaN"),
        ({"pixel_values": torch.zeros(3, 12, 12, dtype=torch.uint8)}, "floating-point"),
        ({"pixel_values": "picture"}, "pixel_values"),
    ],
    ids=lambda value: str(value)[:30].replace("\n", ""),
)
def test_non_images_are_refused_by_vision_models(given: Any, part: str) -> None:
    refused(lambda: seer().analyze(given), part)


def test_bad_pictures_are_not_blamed_on_the_processor() -> None:
    assert "rejected" not in refused(lambda: seer().analyze("a text about a cat"), "no file")


def test_a_vision_model_without_a_processor() -> None:
    lens = Analyzer(tiny("vit"))
    refused(lambda: lens.analyze(picture()), "image processor", "pixel_values")
    refused(lambda: lens.analyze("a text"), "image processor", "pixel_values")


def test_a_vision_model_writes_and_reads_no_text() -> None:
    refused(lambda: seer().analyze(picture(), generate=2), "vision model")
    refused(lambda: seer().analyze(picture(), text_target="a cat"), "target")
    refused(lambda: seer().analyze(words=["a", "cat"]), "vision model")


@pytest.mark.parametrize("lens", [speaker, translator])
def test_a_picture_for_a_text_model(lens: Any) -> None:
    refused(lambda: lens().analyze(picture()), "reads text", "ndarray")
    refused(lambda: lens().analyze({"pixel_values": torch.zeros(3, 12, 12)}), "pixel_values", "vision model")
    refused(lambda: lens().analyze(torch.zeros(3, 12, 12)), "reads text", "Tensor")


# --- sounds ----------------------------------------------------------------------------------------------------------


def test_audio_input() -> None:
    model = tiny("whisper")
    given = inputs("whisper", model)
    result = Analyzer(model).analyze(given)
    assert result.encoder.tokens == tuple(f"{n * 0.02:.2f}s" for n in range(8))
    assert result.decoder.tokens == tuple(map(str, given["decoder_input_ids"][0].tolist()))
    assert_same_sides(
        Analyzer(model).analyze(given | {"input_features": given["input_features"].float().numpy()[0]}), result, 1e-5
    )


@pytest.mark.parametrize(
    ("features", "parts"),
    [
        (torch.zeros(1, 5, 10), ["5 x 10", "16 frames"]),
        (torch.zeros(1, 6, 16), ["6 x 16", "5 mel bins"]),
        (torch.zeros(16), ["dimensions"]),
        (torch.full((1, 5, 16), float("inf")), ["infinite"]),
        (None, ["input_features"]),
    ],
    ids=["short", "bins", "dimensions", "infinite", "none"],
)
def test_invalid_audio(features: Any, parts: list[str]) -> None:
    model = tiny("whisper")
    given = inputs("whisper", model) | {"input_features": features}
    refused(lambda: Analyzer(model).analyze(given), *parts)


def test_text_for_a_speech_model() -> None:
    lens = Analyzer(tiny("whisper"))
    refused(lambda: lens.analyze("a text"), "input_features")
    refused(lambda: lens.analyze({"input_ids": [5, 6], "decoder_input_ids": [1]}), "input_features")
    assert "reads text" not in refused(lambda: lens.analyze(np.zeros(1600)), "ndarray")


def test_the_encoder_alone() -> None:
    """T5's encoder without its decoder is an encoder like any other."""
    whole = tiny("t5")
    encoder = T5EncoderModel(whole.config).double().eval()
    encoder.load_state_dict(whole.state_dict(), strict=False)
    given = inputs("t5", whole)
    alone = Analyzer(encoder).analyze({key: given[key] for key in ("input_ids", "attention_mask")})
    both = Analyzer(whole).analyze(given)
    for scope in both.encoder.scopes:
        torch.testing.assert_close(alone[scope], both.encoder[scope])


def test_the_decoder_alone_is_refused() -> None:
    config = tiny("bart").config
    with pytest.raises(NormscopeError, match="without the encoder"):
        Analyzer(BartForCausalLM(config).eval())
