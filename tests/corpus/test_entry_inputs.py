"""The papers' word pieces as input of models with BERT's tokenizer, and with another one."""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import RobertaTokenizer

from normscope import Analyzer, NormscopeError, corpus
from normscope.corpus import Entry
from normscope.corpus.entry_inputs import decode_word_pieces, entry_input
from normscope.papers.emnlp2021 import PAPER
from normscope.papers.study import reproduce
from tests.helpers.tiny import tiny
from tests.helpers.toys import toy_lens

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
PAIR = ("[CLS]", "the", "cat", "##s", "don", "'", "t", "sit", ".", "[SEP]", "a", "dog", ",", "too", "[SEP]")
TEXTS = ("the cats don't sit. ", " a dog, too")


@cache
def roberta() -> Analyzer:
    """A tiny RoBERTa with a byte-level BPE of its own."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(TEXTS)] * 9, vocab_size=290, special_tokens=SPECIAL, show_progress=False)
    vocabulary = trained.get_vocab()
    merges = [tuple(pair) for pair in json.loads(trained._tokenizer.to_str())["model"]["merges"]]
    tokenizer = RobertaTokenizer(vocab=vocabulary, merges=merges)
    model = tiny("roberta", "MaskedLM", vocab_size=300, pad_token_id=1, max_position_embeddings=80, num_hidden_layers=3)
    return Analyzer(model, tokenizer)


def test_pieces_as_text() -> None:
    assert decode_word_pieces(PAIR) == TEXTS
    assert decode_word_pieces(["[CLS]", "un", "##believ", "##able", "!", "[SEP]"]) == ("unbelievable!",)
    assert decode_word_pieces(["a", "[UNK]", "b"]) == ("a [UNK] b",)
    with pytest.raises(NormscopeError, match="3 texts"):
        decode_word_pieces(["[CLS]", "a", "[SEP]", "b", "[SEP]", "c", "[SEP]"])
    with pytest.raises(NormscopeError, match="empty"):
        decode_word_pieces(["[CLS]", "a", "[SEP]", "[SEP]"])


def test_pieces_of_the_models_own_tokenizer_are_ids() -> None:
    found = entry_input(Entry(id="a", words=("[CLS]", "cat", "[SEP]", "dog", "[SEP]"), pieces=True), toy_lens())
    assert found == {"input_ids": [2, 7, 3, 8, 3], "token_type_ids": [0, 0, 0, 1, 1]}
    with pytest.raises(NormscopeError, match="not in the model's vocabulary"):
        entry_input(Entry(id="a", words=("[CLS]", "zebra", "[SEP]"), pieces=True), toy_lens())


def test_pieces_of_bert_for_roberta() -> None:
    """As the authors' code does: `tokenizer(first, second)` with the spaces that splitting at [SEP] leaves."""
    lens = roberta()
    entry = Entry(id="a", words=PAIR, pieces=True)
    assert entry_input(entry, lens) == TEXTS
    analysis = lens.analyze(entry_input(entry, lens))
    tokens = list(analysis.tokens)
    assert tokens == lens.tokenizer.convert_ids_to_tokens(lens.tokenizer(*TEXTS)["input_ids"])
    middle = tokens.index("</s>")
    assert tokens[middle - 1 : middle + 2] == ["Ġ", "</s>", "</s>"]
    assert tokens[middle + 2].startswith("Ġa")
    single = Entry(id="b", words=("[CLS]", "the", "cat", "[SEP]"), pieces=True)
    assert entry_input(single, lens) == "the cat"


def test_the_papers_data_with_roberta(tmp_path: Path) -> None:
    path = tmp_path / "unlabeled_attn.pkl"
    shorter = ["[CLS]", "a", "cat", "[SEP]", "the", "dog", "##s", "[SEP]"]
    path.write_bytes(pickle.dumps([{"tokens": list(PAIR)}, {"tokens": shorter}], 2))
    report, _ = reproduce(PAPER, roberta(), path, tmp_path / "out", experiments=["comparison", "mixing", "layers"])
    assert report.numbers["mixing.ATTNRESLN-N.L1.mask"] > 0
    items = corpus.open(tmp_path / "out/runs/masked").scan("items").sort("id").collect()
    for tokens, texts in zip(items["tokens"].to_list(), (TEXTS, ("a cat ", " the dogs")), strict=True):
        ids = roberta().tokenizer(*texts)["input_ids"]
        assert len(tokens) == len(ids)
        assert tokens.count("</s>") == 3
        assert tokens.count("<mask>") == max(1, int(0.12 * (len(ids) - 4)))
