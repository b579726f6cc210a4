"""Tiny models that predict, with a tokenizer, and a few labelled texts."""

from __future__ import annotations

import copy
import random
from functools import cache
from pathlib import Path

from normscope import Analyzer
from tests.test_inputs import WORDS as VOCABULARY
from tests.test_inputs import toy_tokenizer
from tests.tiny import tiny
from tests.tiny_layers import tiny as tiny_layers

WORDS = [word for word in VOCABULARY if word.isalpha()]


@cache
def classifier() -> Analyzer:
    return Analyzer(tiny("bert", "SequenceClassification", num_labels=3), toy_tokenizer())


@cache
def masked() -> Analyzer:
    return Analyzer(tiny("bert", "MaskedLM"), toy_tokenizer())


@cache
def causal() -> Analyzer:
    tokenizer = copy.deepcopy(toy_tokenizer())
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return Analyzer(tiny_layers("llama", "CausalLM"), tokenizer)


def texts(count: int = 6) -> list[tuple[str, str]]:
    """Texts with a label, 0 to 2."""
    generator = random.Random(0)
    return [(" ".join(generator.choices(WORDS, k=generator.randint(4, 9))), str(n % 3)) for n in range(count)]


def corpus_file(folder: Path, count: int = 6) -> Path:
    path = folder / "texts.tsv"
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in texts(count)))
    return path
