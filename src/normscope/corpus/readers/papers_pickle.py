"""The papers' Wikipedia excerpts as published: `unlabeled_attn.pkl`, a list of dicts with "tokens"."""

from __future__ import annotations

from collections.abc import Iterator

from normscope.corpus.entries import Entry, Fault, entry_or_fault
from normscope.corpus.readers.data_files import DataFile
from normscope.corpus.readers.plain_pickle import load_plain_pickle
from normscope.errors import NormscopeError


def read_papers_pickle(path: DataFile) -> Iterator[Entry | Fault]:
    """One entry of word pieces per excerpt, including [CLS] and [SEP]; ids are numbers from 1.

    The attention maps in the file are ignored.
    """
    excerpts = load_plain_pickle(path)
    if not isinstance(excerpts, list) or not all(isinstance(excerpt, dict) for excerpt in excerpts):
        raise NormscopeError(f"{path}: Expected a list of dicts with tokens.")
    for number, excerpt in enumerate(excerpts, 1):
        id, where = f"{path.name}:{number}", f"{path}:{number}"
        tokens = excerpt.get("tokens")
        if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens):
            yield entry_or_fault(id, where, words=tuple(tokens), pieces=True)
        else:
            yield Fault(id, where, '"tokens" must be a list of strings.')
