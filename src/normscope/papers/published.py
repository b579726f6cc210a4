"""Published numbers by key, for a model and, where they depend on it, a corpus.

They come from the papers' tables, from their notebooks where these have more digits, or from their figures. Two numbers
of EMNLP 2021's Table 2 come from the notebook for another reason: the paper prints 97.1 and 48.6 for ATTN-W and
ATTNRES-W of BERT-base, but its code gives 96.41 and 48.21, which agree with the per-layer table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from normscope.analyzer import Analyzer


class ModelShape(NamedTuple):
    """Distinguishes models that share a name."""

    model_type: str
    layers: int
    width: int


class Corpus(NamedTuple):
    """Identifies a corpus: number of sequences and mean length (in BERT tokens, including special ones)."""

    sequences: int
    length: float
    name: str


# The papers' models: key -> shape, and the names under which they are distributed.
MODELS: dict[str, tuple[ModelShape, tuple[str, ...]]] = {
    "bert-base": (ModelShape("bert", 12, 768), ("bert-base-uncased",)),
    "bert-large": (ModelShape("bert", 24, 1024), ("bert-large-uncased",)),
    "bert-medium": (ModelShape("bert", 8, 512), ("bert-medium", "bert_uncased_L-8_H-512_A-8")),
    "bert-small": (ModelShape("bert", 4, 512), ("bert-small", "bert_uncased_L-4_H-512_A-8")),
    "bert-mini": (ModelShape("bert", 4, 256), ("bert-mini", "bert_uncased_L-4_H-256_A-4")),
    "bert-tiny": (ModelShape("bert", 2, 128), ("bert-tiny", "bert_uncased_L-2_H-128_A-2")),
    "roberta-base": (ModelShape("roberta", 12, 768), ("roberta-base",)),
    "roberta-large": (ModelShape("roberta", 24, 1024), ("roberta-large",)),
}
CORPORA: dict[str, Corpus] = {
    "wikipedia": Corpus(992, 121_134 / 992, "the 992 Wikipedia pairs of Clark et al. (2019), 121,134 tokens of BERT"),
    "sst2": Corpus(872, 25, "SST-2, validation"),
    "mnli": Corpus(1000, 39, "MNLI, 1000 of validation"),
    "conll03": Corpus(1000, 21, "CoNLL-2003, the first 1000 of validation"),
}
MULTIBERTS = "multiberts"


def published_numbers(paper: str, model: str | None = None, data: str | None = None) -> dict[str, float]:
    """The numbers published for a model, both for this corpus and independent of any corpus."""
    return {
        key: value
        for entry in _published_entries(paper)
        if entry["model"] == model and entry["data"] in (None, data)
        for key, value in entry["figures"].items()
    }


def published_main_numbers(paper: str) -> dict[str, float]:
    """A paper's main numbers, shown next to ours: BERT-base on Wikipedia (alignment: the German-English model; named
    entities: CoNLL-2003)."""
    found = published_numbers(paper, "transformer-iwslt-de-en", "rwth-de-en")
    for data in reversed(CORPORA):
        found |= published_numbers(paper, "bert-base", data)
    return found


def published_for_models(paper: str, names: Sequence[str]) -> tuple[dict[str, float], str]:
    """The published numbers to show beside several models, and whose they are: those of the MultiBERTs (means over 25
    training runs) if all models are MultiBERTs, otherwise the paper's main numbers."""
    if names and all(MULTIBERTS in name.lower() for name in names):
        found = published_numbers(paper, MULTIBERTS, "wikipedia")
        if found:
            return found, "25 MultiBERTs"
    found = published_main_numbers(paper)
    return found, "BERT-base" if found else ""


def quote_published(reference: Mapping[str, float], template: str, *keys: str) -> str:
    """The template filled with published numbers; empty if any of them is unknown."""
    return template.format(*(reference[key] for key in keys)) if all(key in reference for key in keys) else ""


def published_models(paper: str) -> tuple[str, ...]:
    """Keys of the models with published numbers that can be recognised by name and shape."""
    found = {entry["model"] for entry in _published_entries(paper)}
    return tuple(key for key in MODELS if key in found)


def published_corpora(paper: str, model: str) -> tuple[str, ...]:
    """Keys of the corpora with published numbers for this model."""
    found = {entry["data"] for entry in _published_entries(paper) if entry["model"] == model}
    return tuple(key for key in CORPORA if key in found)


def published_model_key(lens: Analyzer) -> str | None:
    """Key of the paper's model with this name and shape; None for other models."""
    config = lens.loaded.base.config
    shape = (config.model_type, getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None))
    # The cache folder is models--org--name.
    parts = set(lens.model_name.replace("\\", "/").replace("--", "/").split("/"))
    for key, (wanted, names) in MODELS.items():
        if shape == wanted and parts & set(names):
            return key
    return None


def published_corpus_key(lengths: Sequence[int], model: str | None) -> str | None:
    """Key of the paper's corpus with these sequence lengths (in tokens); None for other corpora.

    The number of BERT tokens must match exactly for the Wikipedia pairs; for the other corpora rounded mean lengths
    were published. RoBERTa has another vocabulary, so its mean length only has to be similar.
    """
    for key, corpus in CORPORA.items():
        if len(lengths) != corpus.sequences:
            continue
        off = abs(sum(lengths) / len(lengths) - corpus.length)
        allowed = 0.3 * corpus.length if (model or "").startswith("roberta") else 0.0 if key == "wikipedia" else 1.0
        if off <= allowed + 1e-9:
            return key
    return None


def _published_entries(paper: str) -> list[dict[str, Any]]:
    return _load_published().get(paper, [])  # our own studies have no entry


@cache
def _load_published() -> dict[str, list[dict[str, Any]]]:
    text = files("normscope.papers").joinpath("published.json").read_text()
    found: dict[str, list[dict[str, Any]]] = json.loads(text)
    return found
