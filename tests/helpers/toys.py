"""Toy texts and tokenizers, and analyzers of tiny models that read them.

The analyzers are built once and shared: a test that changes a model builds its own with `tiny`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, ViTImageProcessor

from normscope import Analysis, Analyzer, EncoderDecoderAnalysis
from tests.helpers.tiny import inputs, tiny

# --- BERT's kind of tokenizer ----------------------------------------------------------------------------------------

TEXT = "the cats sat on the big red mat"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    *SPECIAL,
    *["a", "the", "cat", "dog", "sat", "ran", "on", "mat", "and", "big", "red", "bird", "saw", "it", "was", "##s"],
]
SCOPES = (
    "ATTN-W",
    "ATTN-N",
    "ATTNRES-W",
    "ATTNRES-N",
    "ATTNRESLN-N",
    "ATTNRESLNFF-N",
    "ATTNRESLNFFRES-N",
    "ATTNRESLNFFRESLN-N",
)


def word_pieces(pieces: Sequence[str], pre_tokenizer: Any) -> Tokenizer:
    """WordPiece with [CLS] and [SEP] around a text or a pair."""
    backend = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend


@cache
def toy_tokenizer() -> PreTrainedTokenizerFast:
    """A fast WordPiece tokenizer with 21 entries, BERT's special tokens and token types."""
    return PreTrainedTokenizerFast(
        tokenizer_object=word_pieces(WORDS, pre_tokenizers.BertPreTokenizer()),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@cache
def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer with a token per letter: the tokens of a text are the letters of its words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    backend = word_pieces([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)], pre_tokenizers.Whitespace())
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


@cache
def toy_lens(family: str = "bert") -> Analyzer:
    return Analyzer(tiny(family), toy_tokenizer())


@cache
def masked() -> Analyzer:
    return Analyzer(tiny("bert", "MaskedLM"), toy_tokenizer())


@cache
def classifier() -> Analyzer:
    return Analyzer(tiny("bert", "SequenceClassification", num_labels=3), toy_tokenizer())


@cache
def named_classifier() -> Analyzer:
    """A classifier whose classes have names."""
    labels = {0: "bad", 1: "good", 2: "so-so"}
    model = tiny("bert", "SequenceClassification", num_labels=3, id2label=labels, label2id={"bad": 0})
    return Analyzer(model, toy_tokenizer())


@cache
def causal() -> Analyzer:
    tokenizer = copy.deepcopy(toy_tokenizer())
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return Analyzer(tiny("llama", "CausalLM"), tokenizer)


def save_model(folder: Path, head: str | None = None, **options: Any) -> Path:
    """Save a tiny float32 BERT with the toy tokenizer."""
    tiny("bert", head, dtype=torch.float32, **options).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def some_ids(length: int, seed: int = 0, low: int = 5, high: int = 50) -> Tensor:
    return torch.randint(low, high, (length,), generator=torch.Generator().manual_seed(seed))


def some_encoding(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def toy_analysis(**options: Any) -> Analysis:
    return toy_lens().analyze(TEXT, **options)


def toy_translation(name: str = "marian", **options: Any) -> EncoderDecoderAnalysis:
    model = tiny(name)
    found: EncoderDecoderAnalysis = Analyzer(model).analyze(inputs(name, model), **options)
    return found


# --- one token per word ----------------------------------------------------------------------------------------------

VOCABULARY = [
    *("<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":", "the", "a", "cat", "dog", "sat", "ran", "on", "mat"),
    *("le", "un", "chat", "chien", "tapis", "sur"),
    *(f"word{n}" for n in range(21, 50)),  # up to the vocabulary size of the tiny models
]
TEMPLATE = (
    "{% for turn in messages %}"
    "{% if turn['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<s> {{ turn['role'] }} : {{ turn['content'] }} </s> "
    "{% endfor %}{% if add_generation_prompt %}<s> assistant :{% endif %}"
)
PROMPT = "the cat sat on a mat"
SOURCE, TARGET = "the cat sat", "le chat sur un tapis"


def word_tokenizer(*, chat: bool = False, single: str = "$A </s>") -> PreTrainedTokenizerFast:
    """One token per word; `single` is the template around a text."""
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


@cache
def speaker(name: str = "llama") -> Analyzer:
    """A causal language model."""
    return Analyzer(tiny(name, "CausalLM"), word_tokenizer(chat=True, single="<s> $A"))


@cache
def translator(name: str = "bart") -> Analyzer:
    """An encoder-decoder."""
    return Analyzer(tiny(name, "Seq2SeqLM", **({"num_decoder_layers": 2} if name == "t5" else {})), word_tokenizer())


# --- pictures --------------------------------------------------------------------------------------------------------


def picture(height: int = 20, width: int = 30) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@cache
def seer(name: str = "vit") -> Analyzer:
    """A vision model."""
    pytest.importorskip("PIL", reason="the image processor needs Pillow")
    return Analyzer(tiny(name), ViTImageProcessor(size={"height": 12, "width": 12}))
