"""Tiny random models of many types in transformers: derived, proved, and equal to the oracle without descriptions."""

from __future__ import annotations

import re

import pytest
import torch

from docs.make_coverage import PAGE
from normscope import Analyzer
from tests.helpers.compare import sides
from tests.helpers.free_oracle import free_oracle
from tests.helpers.zoo import inputs_for, model_types, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:normscope has no family")
# One of each kind: parallel, packed, own attention code, norms after the branch, experts with a shared one, layers that
# differ, latent values, keys selected for each query, a text model inside a larger one, an encoder-decoder.
TYPES = (
    "bigbird_pegasus", "cohere2_moe", "ctrl", "cwm", "deepseek_v32", "falcon", "flex_olmo", "gemma3",
    "granitemoeshared", "openai-gpt", "qwen2_moe", "youtu",
)  # fmt: skip


NO_ORACLE = ("xglm",)  # its masks overflow in float64, in which the oracle runs
# All types that the coverage page calls derived.
DERIVED = sorted(set(re.findall(r"^\| (\S+) \| derived", PAGE.read_text("utf-8"), re.MULTILINE)) & set(model_types()))


@pytest.mark.parametrize("name", TYPES)
def test_maps_equal_the_oracle(name: str) -> None:
    check_maps(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DERIVED if name not in (*TYPES, *NO_ORACLE)])
def test_maps_of_every_type_equal_the_oracle(name: str) -> None:
    check_maps(name)


def check_maps(name: str) -> None:
    """Every cell of every layer of a derived model."""
    model = tiny_model(name)
    given = inputs_for(model, 7)
    lens = Analyzer(model)
    assert lens.family.derived
    found = list(sides(lens.analyze({key: one for key, one in given.items() if "input_ids" in key})).values())
    expected = [layers for layers in free_oracle(model, given).values() if len(layers) > 1]
    for analysis, layers in zip(found, expected[-len(found) :], strict=True):
        for n, layer in enumerate(layers):
            parts = layer.output.parts
            norms = (parts[:, 0] if parts.dim() == 4 else parts).norm(dim=-1).t()
            assert torch.allclose(analysis["layer"][n].double(), norms, rtol=1e-4, atol=1e-5 * float(norms.max()))
