"""Maps by source against the maps by token of the same text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as kinds
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from benchmarks.measures import Row
from benchmarks.models import VOCABULARY
from benchmarks.timing import best, interleaved
from normscope import Analyzer

SOURCES, TOKENS = 8, 1024


def rows() -> Iterator[Callable[[], Row]]:
    """All scopes of a causal, gated model with grouped heads."""
    yield sources_over_tokens


def sources_over_tokens() -> Row:
    """The maps by 8 sources relative to those by 1,024 tokens, all scopes; both include the forward pass."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    lens = Analyzer(LlamaModel(config).eval(), _word_tokenizer())
    chosen = random.Random(0)
    texts = [" ".join(f"w{chosen.randrange(VOCABULARY - 1)}" for _ in range(TOKENS // SOURCES)) for _ in range(SOURCES)]
    tasks = {
        "tokens": lambda: lens.analyze(" ".join(texts)),
        "sources": lambda: lens.analyze(sources=texts),
    }
    seconds = interleaved(tasks, 200, least=2)
    times = best(seconds)
    shape = f"{config.num_hidden_layers} layers, 1 x {TOKENS}"
    value = times["sources"] / times["tokens"]
    return Row(f"maps by {SOURCES} sources / tokens", "Llama 4 x 512", shape, value, 0.08, seconds=seconds)


def _word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    words = ["<unk>", *(f"w{n}" for n in range(VOCABULARY - 1))]
    backend = Tokenizer(kinds.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
