"""Kinds of tokens, and how much of a map falls to each (EMNLP 2020, Fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CATEGORIES = ("first", "separator", "mask", "punctuation", "other")
FIRST = {"[CLS]", "<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"}
SEPARATOR = {"[SEP]", "</s>", "<eos>", "<|eot_id|>", "<|end_of_text|>"}
MASK = {"[MASK]", "<mask>"}
PUNCTUATION = {",", "."}


def category(token: str) -> str:
    """The papers' kinds: [CLS] (or what starts a text), [SEP], [MASK], comma and period, the rest."""
    plain = token.removeprefix("\u2581").removeprefix("\u0120")
    for name, members in (("first", FIRST), ("separator", SEPARATOR), ("mask", MASK), ("punctuation", PUNCTUATION)):
        if plain in members:
            return name
    return "other"


def sums(maps: Tensor, tokens: Sequence[str]) -> dict[str, Tensor]:
    """category -> (layers,): for each, the sum over its columns, averaged over rows; 0 where there is none."""
    kinds = [category(token) for token in tokens]
    found = {}
    for name in CATEGORIES:
        chosen = torch.tensor([kind == name for kind in kinds])
        found[name] = maps[..., chosen].sum(-1).mean(-1)
    return found
