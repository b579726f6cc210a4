"""Word alignments of a parallel corpus: the measure `word_links`, and the run behind `normscope align`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry, Fault
from normscope.corpus.measure_registry import Columns, Sample, register_measure
from normscope.corpus.readers.formats import read
from normscope.corpus.runner import Progress, Summary, run
from normscope.corpus.store import Run
from normscope.corpus.word_ids import Words, gold_word_ids
from normscope.errors import NormscopeError
from normscope.measures.alignment import Hits, check_link_options, count_link_hits, format_pharaoh
from normscope.models.scopes import resolve_scopes
from normscope.word_alignment import align_words, choose_alignment_layer

COUNTS = ("sure", "links", "linked", "in_sure", "in_possible")


@dataclass(frozen=True)
class CorpusAlignment:
    """The word alignments of a corpus."""

    lines: tuple[str, ...]  # of each entry in Pharaoh format; empty if it could not be aligned
    faults: tuple[Fault, ...]  # the entries that could not be aligned
    every: Hits  # over all target words
    linked: Hits  # over the target words with a gold link
    scope: str
    layer: int
    setting: str
    summary: Summary


@register_measure("word_links", scopes=("XATTN-N",), whole=True)
def measure_word_links(sample: Sample) -> Columns:
    """pharaoh -> the links between the words of a sentence pair; sure gold links, links drawn, those of target words
    that have a gold link, those that are sure, those that are possible"""
    analysis, entry = sample.analysis, sample.entry
    if analysis.info["side"] != "decoder":
        return {"pharaoh": [], **{name: [] for name in COUNTS}}
    source, target = parallel_word_ids(sample)
    found = align_words(analysis, **sample.settings, word_ids=(*target, *source))
    every, linked = count_link_hits(found.links, entry.sure, entry.possible)
    counts = (every.sure, every.links, linked.links, every.in_sure, every.in_possible)
    return {"pharaoh": [format_pharaoh(found.links)], **{n: [c] for n, c in zip(COUNTS, counts, strict=True)}}


def parallel_word_ids(sample: Sample) -> tuple[Words, Words]:
    """The word of each source token, and of each decoder input; words are what is between spaces."""
    tensors, tokenizer = sample.item.tensors, sample.lens.tokenizer
    words, target = parallel_words(sample.entry)
    source = gold_word_ids(words, tensors["input_ids"].tolist(), tokenizer)
    return source, gold_word_ids(target, tensors["decoder_input_ids"].tolist(), tokenizer, target=True)


def parallel_words(entry: Entry) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words of both sides of a sentence pair."""
    text, target = entry.pair or (entry.text, entry.target)
    words = entry.words or tuple((text or "").split())
    if target is None:
        raise NormscopeError(
            "Aligning words needs sentence pairs, but this entry has no target text. Name its column with the reader's "
            "option target, or give a second file."
        )
    return words, tuple(target.split()) if isinstance(target, str) else target


def align_corpus(
    data: str | Path,
    lens: Analyzer,
    folder: str | Path,
    *,
    scope: str = "XATTN-N",
    layer: int | None = None,
    setting: str | None = None,
    threshold: float | None = None,
    symmetrise: str | None = None,
    gold: bool = False,
    format: str | None = None,
    reader: Mapping[str, Any] | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> CorpusAlignment:
    """Align the words of every sentence pair of a corpus, in a resumable run.

    Args:
        data: The corpus, as for `normscope.corpus.run`.
        lens: An encoder-decoder.
        folder: The folder of the run.
        scope: As for `EncoderDecoderAnalysis.alignments`.
        layer: As for `EncoderDecoderAnalysis.alignments`, counted from 0.
        setting: As for `EncoderDecoderAnalysis.alignments`.
        threshold: As for `EncoderDecoderAnalysis.alignments`.
        symmetrise: As for `EncoderDecoderAnalysis.alignments`.
        gold: Require gold links in the data.
        format: The format of the data (default: from the file name).
        reader: Options of the format's reader.
        limit: Read only this many entries.
        batch_size: Number of entries per forward pass.
        progress: A function called with the number of finished entries and of all entries.

    Returns:
        A line for each entry, in order, and the counts of gold links. If the run was interrupted, its summary is not
        `finished`, and the lines are those of the finished entries.

    Raises:
        NormscopeError: If the model is not an encoder-decoder, an argument is invalid, or no entry can be aligned.
    """
    if not lens.two_sided:
        raise NormscopeError(
            f"{lens.family.name} is not an encoder-decoder; words are aligned by one that translates, such as Marian."
        )
    check_link_options(threshold, symmetrise)
    given = dict(reader or {})
    _check_sentence_pairs(data, format, given, limit, gold)
    ((name,),) = resolve_scopes([scope], lens.loaded.stacks[-1].blocks)
    layer, setting = choose_alignment_layer(lens.loaded.depths[-1], name, layer, setting)
    settings = {"scope": name, "layer": layer, "setting": setting, "threshold": threshold, "symmetrise": symmetrise}
    summary = run(
        data,
        lens,
        folder,
        measures="word_links",
        scopes=[name],
        layers=[layer],
        settings=settings,
        format=format,
        reader=given,
        limit=limit,
        batch_size=batch_size,
        progress=progress,
    )
    found = Run(folder)
    if summary.done and summary.faults == summary.done:
        first = _corpus_alignment_faults(found)[0]
        raise NormscopeError(f"No sentence pair could be aligned. The first error is at {first.where}: {first.reason}")
    table = found.scan("word_links").collect() if "word_links" in found.tables else pl.DataFrame({"id": []})
    by_id = dict(zip(table["id"], table["pharaoh"], strict=True)) if len(table) else {}
    lines = tuple(by_id.get(entry.id, "") for entry in islice(read(data, format, **given), limit))
    sums = {name: int(table[name].sum()) if len(table) else 0 for name in COUNTS}
    every, linked = (Hits(sums[n], sums["sure"], sums["in_sure"], sums["in_possible"]) for n in ("links", "linked"))
    return CorpusAlignment(lines, _corpus_alignment_faults(found), every, linked, name, layer, setting, summary)


def _corpus_alignment_faults(found: Run) -> tuple[Fault, ...]:
    if "errors" not in found.tables:
        return ()
    return tuple(Fault(*row) for row in found.scan("errors").select("id", "where", "reason").collect().iter_rows())


def _check_sentence_pairs(
    data: str | Path, format: str | None, reader: Mapping[str, Any], limit: int | None, gold: bool
) -> None:
    """Refuse data whose first readable entry is not a sentence pair, or data without gold links if those are needed."""
    entries = [one for one in islice(read(data, format, **reader), limit) if isinstance(one, Entry)]
    if entries:
        parallel_words(entries[0])
    if gold and not any(entry.possible for entry in entries):
        raise NormscopeError("The data have no gold links. Read them with format='alignments', or leave gold out.")
