"""Targets of several tokens: a span as one target, and every token of it by itself, relative to single tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import models
from benchmarks.measures import Row
from benchmarks.timing import best, interleaved
from normscope import Analyzer

SHAPE = "Llama, 4 x 512"
SPAN = 40  # tokens


def small_llama() -> PreTrainedModel:
    """A Llama with 4 layers of width 512, 8 heads over 4, and random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1408,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.eval()
    return model


def span(length: int, budget: float, bar: float | None = None) -> Row:
    """The last tokens as one target, relative to the last one alone."""
    lens, inputs = Analyzer(small_llama()), models.encoding(1, length)
    inputs.pop("token_type_ids", None)
    seconds = interleaved(
        {
            "one": lambda: lens.flow(inputs, target=slice(length - 1, length)),
            "span": lambda: lens.flow(inputs, target=slice(length - SPAN, length)),
        },
        budget,
    )
    times = best(seconds)
    return Row(
        f"{SPAN} tokens as one target / one token",
        SHAPE,
        f"1 x {length}",
        times["span"] / times["one"],
        bar,
        seconds=seconds,
    )


def matrix(length: int, budget: float, bar: float | None = None) -> Row:
    """Every one of the last tokens by itself, relative to as many single flows."""
    lens, inputs = Analyzer(small_llama()), models.encoding(1, length)
    inputs.pop("token_type_ids", None)
    seconds = interleaved(
        {
            "one": lambda: lens.flow(inputs, target=slice(length - 1, length)),
            "matrix": lambda: lens.flow(inputs, target=slice(length - SPAN, length), each=True),
        },
        budget,
        least=2,
    )
    times = best(seconds)
    return Row(
        f"matrix of {SPAN} targets / {SPAN} single flows",
        SHAPE,
        f"1 x {length}",
        times["matrix"] / (SPAN * times["one"]),
        bar,
        seconds=seconds,
    )


def rows() -> Iterator[Callable[[], Row]]:
    """Every measurement with its bar."""
    yield lambda: span(512, 20, 1.2)
    yield lambda: matrix(512, 40, 0.4)
