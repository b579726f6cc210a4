"""Model types that share a family's layers, or have no test of their own elsewhere: each is described, as derivation
would describe it, proved, equal to the oracle without descriptions, and independent of padding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from normscope import Analyzer
from normscope.derivation.family import describe_model
from normscope.derivation.prove import CLOSE, prove_description
from normscope.models.registry import FAMILIES
from tests.helpers.compare import assert_same_sides, sides
from tests.helpers.free_oracle import free_oracle
from tests.helpers.tiny import CONFIGS, HYBRIDS, model_type
from tests.helpers.zoo import inputs_for, model_types, randomise, tiny_config, tiny_model

# In test_families, test_bert_families and test_hybrids.
OTHERS = {model_type(name) for name in (*CONFIGS, *HYBRIDS)}
TYPES = sorted({kind for family in FAMILIES if family.input == "text" for kind in family.model_types} - OTHERS)
# transformers computes their norms or attention probabilities in float32
FLOAT64 = ("biogpt", "data2vec-text", "ernie", "layoutlm", "mbart", "pegasus", "roberta-prelayernorm", "xlm-roberta-xl")
DIFFERENT = {"granite": "derivation finds the number by which branches are multiplied, the family names its attribute"}


@cache
def model_of(name: str) -> Any:
    if name not in model_types() or name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = tiny_model(name, dtype=torch.float64)
    for module in model.modules():
        if type(module).__name__ == "XIELUActivation":  # it jumps at zero, by eps; the oracle integrates its slope
            module.eps.zero_()
    return model


@cache
def lens_of(name: str) -> Analyzer:
    return Analyzer(model_of(name))


def given(name: str, length: int = 7) -> dict[str, Tensor]:
    """One input, with masks."""
    encoding = inputs_for(model_of(name), length)
    masks = {key.replace("input_ids", "attention_mask"): torch.ones_like(one) for key, one in encoding.items()}
    return encoding | masks


@pytest.mark.parametrize("name", TYPES)
def test_described_and_proved(name: str) -> None:
    lens = lens_of(name)
    assert not lens.family.derived
    assert prove_description(lens.loaded) <= CLOSE
    derived = describe_model(model_of(name)).stacks
    assert (derived == lens.family.stacks) is (name not in DIFFERENT)


@pytest.mark.parametrize("name", TYPES)
def test_maps_equal_the_oracle(name: str) -> None:
    found = list(sides(lens_of(name).analyze(given(name))).values())
    expected = [layers for layers in free_oracle(model_of(name), given(name)).values() if len(layers) > 1]
    rtol = 1e-9 if name in FLOAT64 else 1e-6
    for analysis, layers in zip(found, expected[-len(found) :], strict=True):
        assert len(analysis.layers) == len(layers)
        for n, layer in enumerate(layers):
            parts = layer.output.parts
            vectors = (parts[:, 0] if parts.dim() == 4 else parts).transpose(0, 1)
            torch.testing.assert_close(analysis["layer"][n], vectors.norm(dim=-1), rtol=rtol, atol=1e-14)
            rest = layer.output.rest[0].norm(dim=-1)
            torch.testing.assert_close(analysis.remainder(analysis.scopes[-1])[n], rest, rtol=0, atol=10 * rtol)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_gone(name: str, side: str) -> None:
    encoding = given(name)
    before = (3, 0) if side == "left" else (0, 3)
    padded = {
        key: nn.functional.pad(one, before, value=0 if key.endswith("mask") else 7) for key, one in encoding.items()
    }
    assert_same_sides(lens_of(name).analyze(padded), lens_of(name).analyze(encoding), 1e-6)


def test_esm_with_rotary_positions() -> None:
    config = tiny_config("esm")
    config.position_embedding_type = "rotary"
    config._attn_implementation = "eager"
    model = transformers.EsmModel(config).eval()
    randomise(model)
    lens = Analyzer(model)
    assert lens.family.name == "ESM (rotary)"
    assert prove_description(lens.loaded) <= CLOSE
