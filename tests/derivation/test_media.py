"""Models of images and sound are derived, proved, and equal to the oracle without descriptions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normscope import Analyzer, NormscopeError, derive
from normscope.derivation.prove import CLOSE, prove_description
from normscope.inputs.samples import random_media
from tests.helpers.compare import refused
from tests.helpers.free_oracle import free_oracle
from tests.helpers.zoo import media_types, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:normscope has no family")
# A class token, none; a waveform, frames of mel bins.
TYPES = ("vit_msn", "ijepa", "sew", "audio-spectrogram-transformer")


def lens_and_input(name: str) -> tuple[Analyzer, dict[str, Tensor]]:
    kinds = media_types()
    lens = Analyzer(tiny_model(name, (kinds["image"] | kinds["audio"])[name], dtype=torch.float64))
    given = random_media(lens.loaded.base, torch.Generator().manual_seed(1))
    return lens, {key: one[None].double() for key, one in given.items()}


@pytest.mark.parametrize("name", TYPES)
def test_derived_and_equal_to_the_oracle(name: str) -> None:
    lens, given = lens_and_input(name)
    assert lens.family.derived
    assert lens.family.input == ("image" if "pixel_values" in given else "audio")
    assert prove_description(lens.loaded) <= CLOSE
    analysis = lens.analyze(given)
    (layers,) = [some for some in free_oracle(lens.model, given).values() if len(some) == len(analysis.layers)]
    for n, layer in enumerate(layers):
        norms = layer.output.parts[:, 0].norm(dim=-1).t()
        torch.testing.assert_close(analysis["layer"][n], norms, rtol=1e-6, atol=1e-12)


def test_tokens_have_names() -> None:
    lens, given = lens_and_input("beit")
    tokens = lens.analyze(given, layers=[0], scopes="layer").tokens
    assert tokens[:2] == ("[CLS]", "1,1")
    lens, given = lens_and_input("siglip_vision_model")
    assert lens.analyze(given, layers=[0], scopes="layer").tokens[0] == "1,1"
    lens, given = lens_and_input("wav2vec2")
    assert lens.analyze(given, layers=[0], scopes="layer").tokens[0] == "0.00s"


def test_sounds_of_several_lengths_are_not_padded() -> None:
    lens, given = lens_and_input("wav2vec2")
    (sound,) = given["input_values"]
    sounds = [sound, sound[: len(sound) // 2], sound]
    together = list(lens.stream([{"input_values": one} for one in sounds]))
    for one, result in zip(sounds, together, strict=True):
        alone = lens.analyze({"input_values": one})
        torch.testing.assert_close(result["layer"], alone["layer"], rtol=1e-9, atol=1e-12)


def test_bad_sounds() -> None:
    lens, given = lens_and_input("wav2vec2")
    sound = given["input_values"]
    refused(lambda: lens.analyze("a text"), "is a speech model", "input_values")
    refused(lambda: lens.analyze({"input_ids": torch.ones(1, 3)}), "has no input_values")
    mask = torch.ones_like(sound)
    lens.analyze({"input_values": sound, "attention_mask": mask}, layers=[0], scopes="layer")
    mask[:, -5:] = 0
    refused(lambda: lens.analyze({"input_values": sound, "attention_mask": mask}), "padded")
    refused(lambda: lens.analyze({"input_values": sound[:, :2]}), "forward pass failed")
    refused(lambda: lens.analyze(given, generate=3), "no decoder")


def test_what_is_not_known_is_refused() -> None:
    kinds = media_types()
    for name, words in (("segformer", "of a form that normscope does not know"), ("swin", "cannot be described")):
        with pytest.raises(NormscopeError, match=words):
            derive(tiny_model(name, kinds["image"][name]))
