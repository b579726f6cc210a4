"""Texts with pictures: their tokens, where these lie, the maps and flows of a decoder that sees, and bad input."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from normscope import Analysis, Analyzer, NormscopeError
from normscope.inputs.encode import encode, forward_inputs
from normscope.inputs.generation import append_written_tokens
from tests.helpers.compare import refused
from tests.helpers.free_oracle import free_oracle
from tests.helpers.pictures import KINDS, PictureModel, mistral_encoding, picture, picture_model, tokenizer_of
from tests.helpers.tiny import inputs, tiny

pytestmark = pytest.mark.filterwarnings("ignore:normscope has no family")
SQUARE = ("llava", "gemma3", "paligemma")  # pictures of one size
CLOSE = 1e-5


def asked(kind: str, image: Image.Image, model: PictureModel) -> Any:
    return mistral_encoding(model, image) if kind == "mistral3" else model.ask(image)


def pass_patches_through(model: nn.Module) -> None:
    """Make every layer of the vision tower the identity, so that a patch stays where it is."""
    for path, one in model.named_modules():
        names = path.split(".")
        inside = "language_model" in names or "text_model" in names
        if not inside and names[-1].isdigit() and names[-2] in ("layers", "layer", "blocks"):
            one.forward = lambda hidden_states, *args, **kwargs: hidden_states  # type: ignore[method-assign]


def read_states(lens: Analyzer, given: Any) -> Tensor:
    """(tokens, d): what the first layer of the decoder reads."""
    (item,) = encode(lens.loaded, given)
    found: list[Tensor] = []
    layer = lens.loaded.calls.modules["decoder"][0]
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        lens.model.base_model(**forward_inputs(lens.loaded, [item]))
    handle.remove()
    return found[0][0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bright_patch_is_where_it_is(kind: str) -> None:
    """The tokens whose embedding changes with a part of the picture are those that are named after its place."""
    model = picture_model(kind)
    lens = Analyzer(model.model, model.processor)
    width = 16 if kind in SQUARE else 32
    dark = np.full((16, width, 3), 40, dtype=np.uint8)
    given = asked(kind, Image.fromarray(dark), model)
    (item,) = encode(lens.loaded, given)
    (one,) = item.pictures
    fine = one.grids[0].positions
    pass_patches_through(lens.model)
    before = read_states(lens, given)
    down, across = fine.shape
    for row, column in ((0, 0), (0, across - 1), (down - 1, 0), (down // 2, across // 2 - 1)):
        bright = dark.copy()
        high, wide = 16 // down, width // across
        bright[row * high : (row + 1) * high, column * wide : (column + 1) * wide] = 250
        change = (read_states(lens, asked(kind, Image.fromarray(bright), model)) - before).norm(dim=-1)
        lit = change[fine] > 1e-3 * change[fine].max()
        assert lit.nonzero().tolist() == [[row, column]]
        for overview in one.grids[1:]:
            high, wide = overview.positions.shape
            at = int(change[overview.positions].argmax())
            place = (at // wide / high, at % wide / wide)
            assert abs(place[0] - row / down) < 1 / high + 1e-9
            assert abs(place[1] - column / across) < 1 / wide + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_maps_equal_the_oracle_and_flows_are_complete(kind: str) -> None:
    model = picture_model(kind)
    lens = Analyzer(model.model, model.processor)
    given = asked(kind, picture(16 if kind in SQUARE else 32), model)
    result = lens.analyze(given)
    assert max(float(one.max()) for one in result.completeness.values()) < CLOSE
    layers = decoder_oracle(lens, given)
    assert len(layers) == len(result.layers)
    for n, layer in enumerate(layers):
        norms = layer.output.parts[:, 0].norm(dim=-1).t()
        torch.testing.assert_close(result["layer"][n], norms, rtol=1e-6, atol=1e-9)
    flow = lens.flow(given, target="top")
    assert flow.to is not None
    assert flow.completeness is not None
    assert max(flow.to.completeness, float(flow.completeness.max())) < CLOSE


def decoder_oracle(lens: Analyzer, given: Any) -> list[Any]:
    """The layers of the decoder alone, called as the whole model calls it."""
    (item,) = encode(lens.loaded, given)
    base: Any = lens.model.base_model
    language = base.language_model if hasattr(base, "language_model") else base.text_model
    calls: list[dict[str, Any]] = []
    handle = language.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        base(**forward_inputs(lens.loaded, [item]))
    handle.remove()
    kept = {key: one for key, one in calls[0].items() if one is not None and key != "past_key_values"}
    (layers,) = free_oracle(language, {"inputs_embeds": kept.pop("inputs_embeds"), **kept}).values()
    return layers


def columns(result: Analysis) -> tuple[str, ...]:
    return tuple(label.token for label in result.columns)


def test_tokens_sources_and_words() -> None:
    model = picture_model("llava")
    lens = Analyzer(model.model, model.processor)
    given = model.ask(picture(seed=1), picture(seed=2))
    result = lens.analyze(given, scopes="layer", layers=0)
    assert result.tokens[:4] == ("the", "user", ":", "image 1 1,1")
    assert result.tokens[18:21] == ("image 1 4,4", "and", "image 2 1,1")
    assert result.word_ids is not None
    assert result.word_ids[:4] == (0, 1, 2, None)
    assert [one["name"] for one in result.info["pictures"]] == ["image 1", "image 2"]
    by_picture = lens.analyze(given, scopes="layer", layers=0, sources="image")
    assert columns(by_picture) == ("image 1", "image 2", "(rest)")
    words = lens.analyze(given, scopes="layer", layers=0, sources="word")
    assert columns(words) == ("the", "user", ":", "and", "what", "is", "this", "?", "image 1", "image 2")
    begin = given["text"].index("what")
    spans = lens.flow(given, target="top", sources={"question": (begin, begin + 7)})
    assert {name: len(columns) for name, columns in spans.sources.items()} == {
        "question": 2, "image 1": 16, "image 2": 16, "(rest)": 6,
    }  # fmt: skip


def test_an_encoding_and_a_conversation_are_read_alike() -> None:
    model = picture_model("llava")
    lens = Analyzer(model.model, model.processor)
    image = picture()
    whole = lens.analyze(model.ask(image), scopes="layer")
    encoded = model.processor(**model.ask(image), return_tensors="pt")
    assert torch.equal(lens.analyze(encoded, scopes="layer")["layer"], whole["layer"])
    assert lens.analyze(encoded, scopes="layer", layers=0).tokens == whole.tokens
    turn = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what is this ?"}]}
    chat = lens.analyze(chat=[turn], scopes="layer", sources="image")
    assert columns(chat) == ("image", "(rest)")
    assert chat.tokens[-2:] == ("assistant", ":")
    both = list(lens.stream([model.ask(image), "what is this ?", model.ask(picture(seed=3))], scopes="layer"))
    torch.testing.assert_close(both[0]["layer"], whole["layer"])
    assert "pictures" not in both[1].info


@pytest.mark.parametrize("kind", ["llava", "gemma3", "paligemma", "qwen2_vl", "qwen3_vl"])
def test_explain_from_answer_to_patches(kind: str) -> None:
    model = picture_model(kind)
    lens = Analyzer(model.model, model.processor)
    image = picture(16 if kind in SQUARE else 32)
    told = lens.explain(model.ask(image), answer="a red square")
    assert float(told.completeness.max()) < CLOSE
    assert list(told.sources) == ["image", "(prompt)", "(answer)"]
    assert sum(told.by_source.values()) + float(told.remainder.sum()) == pytest.approx(told.value, rel=1e-6)
    written = lens.explain(model.ask(image), generate=3)
    assert 1 <= len(written.rows) <= 3
    assert float(written.completeness.max()) < CLOSE
    # What the model writes with the picture is what a plain pass over all tokens predicts.
    logits = plain_logits(lens, model.ask(image), written.rows)
    assert [int(line.argmax()) for line in logits] == written_ids(lens, written.tokens)


def written_ids(lens: Analyzer, names: Iterable[str]) -> list[int]:
    """The ids of tokens; those that the tokenizer does not know are named by their ids."""
    vocabulary = lens.tokenizer.get_vocab()
    return [vocabulary[name] if name in vocabulary else int(name) for name in names]


def plain_logits(lens: Analyzer, given: Any, rows: Any) -> Tensor:
    """The logits from which each token of an answer is read, with the picture's tokens as the model is given them."""
    (item,) = encode(lens.loaded, given)
    ids = torch.tensor(written_ids(lens, [label.token for label in rows]))
    grown = append_written_tokens(item, ids, lens.tokenizer)
    with torch.no_grad():
        logits: Tensor = lens.model(**forward_inputs(lens.loaded, [grown])).logits[0]
    return logits[[label.position - 1 for label in rows]]


def test_only_the_exact_flow_follows_pictures_into_deeper_layers() -> None:
    model = picture_model("qwen3_vl")
    lens = Analyzer(model.model, model.processor)
    refused(lambda: lens.flow(model.ask(picture()), method="rollout"), "before several layers", "method='exact'")
    assert lens.flow("what is this ?", method="rollout").map.shape == (4, 4)


def test_tiles_whose_number_does_not_say_their_shape_have_no_place() -> None:
    model = picture_model("internvl")
    lens = Analyzer(model.model, model.processor)
    encoded = model.processor(**model.ask(picture()), return_tensors="pt")
    tokens = lens.analyze(encoded, scopes="layer", layers=0).tokens
    assert tokens[4:6] == ("image 1", "image 2")
    assert "image overview 1,1" in lens.analyze(model.ask(picture()), scopes="layer", layers=0).tokens


def test_bad_pictures(tmp_path: Path) -> None:
    model = picture_model("llava")
    lens = Analyzer(model.model, model.processor)
    image, text = picture(), f"{model.placeholder} what is this ?"
    refused(lambda: lens.analyze({"text": "what is this ?", "images": [image]}), "0 places", "<image>")
    refused(lambda: lens.analyze({"text": text + text, "images": [image]}), "2 places for pictures", "1 pictures")
    refused(lambda: lens.analyze({"text": text, "images": []}), "images is empty")
    refused(lambda: lens.analyze({"images": [image]}), "with a text")
    refused(lambda: lens.analyze({"text": text, "images": [image], "sound": 1}), "Unknown keys", "sound")
    refused(lambda: lens.analyze({"text": text, "videos": ["film.mp4"]}), "Videos are not read", "frames")
    refused(lambda: lens.analyze({"text": text, "images": ["film.mp4"]}), "is a video", "frames")
    refused(lambda: lens.analyze({"text": text, "images": ["none.png"]}), "no file", "none.png")
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    refused(lambda: lens.analyze({"text": text, "images": [broken]}), "cannot be read as an image")
    huge = tmp_path / "huge.png"
    Image.new("1", (1, 1)).save(huge)
    huge.write_bytes(with_size(huge.read_bytes(), 60_000))
    refused(lambda: lens.analyze({"text": text, "images": [huge]}), "cannot be read as an image", "exceeds limit")
    refused(lambda: lens.analyze({"text": text, "images": [{"url": 3}]}), "This is a vision model: pass a path")
    part = {"role": "user", "content": [{"type": "video", "path": "film.mp4"}]}
    refused(lambda: lens.analyze(chat=[part]), "Videos are not read")
    refused(lambda: lens.analyze(chat=[{"role": "user", "content": [{"type": "image"}]}]), "needs its picture")
    refused(lambda: lens.analyze("what is this ?", sources="image"), "which has none")
    refused(lambda: lens.explain(model.ask(image), target=slice(4, 6)), "tokens of pictures", "never predicted")


def with_size(png: bytes, side: int) -> bytes:
    """A PNG file whose header says that it is so large."""
    import zlib

    header = png[12:16] + side.to_bytes(4, "big") * 2 + png[24:29]
    return png[:12] + header + zlib.crc32(header).to_bytes(4, "big") + png[33:]


def test_pictures_need_a_model_that_sees_and_its_processor() -> None:
    text = tiny("llama")
    refused(lambda: Analyzer(text).analyze({"text": "what", "images": [picture()]}), "vision models")
    refused(lambda: Analyzer(text).analyze(inputs("llama", text) | {"pixel_values": torch.zeros(1)}), "vision models")
    refused(lambda: Analyzer(tiny("t5")).analyze({"text": "what", "images": [picture()]}), "reads text", "images")
    speaker = Analyzer(tiny("llama", vocab_size=60), tokenizer_of("llava"))
    turn = {"role": "user", "content": [{"type": "image", "image": picture()}]}
    refused(lambda: speaker.analyze(chat=[turn]), "has images", "vision models")
    model, other = picture_model("llava"), picture_model("internvl")
    alone = Analyzer(model.model, model.processor.tokenizer)
    refused(lambda: alone.analyze(model.ask(picture())), "no processor", "AutoProcessor")
    with pytest.raises(NormscopeError, match="does not belong to this model"):
        Analyzer(model.model, other.processor)
    encoded = picture_model("qwen2_vl").processor(text="<|image_pad|> what", images=[picture()], return_tensors="pt")
    refused(lambda: alone.analyze(encoded), "takes no image_grid_thw", "another model")
    two = model.processor(text=[model.placeholder] * 2, images=[picture()] * 2, return_tensors="pt")
    refused(lambda: alone.analyze(two), "2 texts with pictures", "one text")
    whole = model.processor(**model.ask(picture()), return_tensors="pt")
    whole["input_ids"][0, 5] = 4
    refused(lambda: alone.analyze(whole), "forward pass failed")
    refused(lambda: alone.analyze(whole | {"pixel_values": whole["pixel_values"] * float("nan")}), "NaN")
    refused(lambda: alone.analyze({**whole, "input_ids": whole["input_ids"] * 0 + 4}), "no place for its pictures")


def test_a_model_that_sees_is_loaded_by_name(tmp_path: Path) -> None:
    model = picture_model("llava", dtype=torch.float32)
    model.model.save_pretrained(tmp_path)
    model.processor.save_pretrained(tmp_path)
    lens: Analyzer[Analysis] = Analyzer.from_pretrained(tmp_path)
    assert type(lens.model) is type(model.model)
    told = lens.explain(model.ask(picture()), answer="a red square")
    assert list(told.sources) == ["image", "(prompt)", "(answer)"]
    tower: Any = model.model.base_model.vision_tower
    assert Analyzer(tower, model.processor).analyze(picture(), scopes="layer").tokens[:2] == ("[CLS]", "1,1")
