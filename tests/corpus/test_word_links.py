"""Word alignments of a corpus: the same links as one pair at a time, in the order of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normscope import Analyzer, EncoderDecoderAnalysis, NormscopeError
from normscope.corpus.word_links import align_corpus
from normscope.measures.alignment import Hits
from tests.helpers.files import write
from tests.helpers.toys import toy_lens, translator

PAIRS = [
    ("the cat sat", "le chat sur un tapis"),
    ("a dog ran on the mat", "un chien"),
    ("cat", "chat"),
    ("the dog", "le chien sur le chat"),
]


def gold_file(folder: Path) -> Path:
    lines = [
        {"src_words": source.split(), "tgt_words": target.split(), "alignment": [[0, 0]]} for source, target in PAIRS
    ]
    return write(folder, "".join(json.dumps(line) + "\n" for line in lines), "gold.jsonl")


def one_by_one(lens: Analyzer, **options: Any) -> list[set[tuple[int, int]]]:
    found = []
    for source, target in PAIRS:
        result = lens.analyze(source, text_target=target)
        assert isinstance(result, EncoderDecoderAnalysis)
        found.append(set(result.alignments(**options)))
    return found


def as_lines(links: list[set[tuple[int, int]]]) -> tuple[str, ...]:
    return tuple(" ".join(f"{s}-{t}" for s, t in sorted(some)) for some in links)


@pytest.mark.parametrize(
    "options",
    [{}, {"layer": 1}, {"setting": "AWO", "layer": 0}, {"scope": "layer", "threshold": 0.1}, {"symmetrise": "union"}],
)
def test_a_corpus_is_aligned_as_its_pairs_are(tmp_path: Path, options: dict[str, Any]) -> None:
    lens = translator()
    found = align_corpus(
        gold_file(tmp_path), lens, tmp_path / "run", gold=True, format="alignments", batch_size=2, **options
    )
    links = one_by_one(lens, **options)
    assert found.lines == as_lines(links)
    right = sum((0, 0) in some for some in links)
    first = sum(target == 0 for some in links for _, target in some)
    assert found.every == Hits(sum(map(len, links)), 4, right, right)
    assert found.linked == Hits(first, 4, right, right)
    assert (found.faults, found.summary.finished) == ((), True)


def test_two_files_and_tables(tmp_path: Path) -> None:
    lens = translator()
    expected = as_lines(one_by_one(lens))
    source = write(tmp_path, "".join(f"{source}\n" for source, _ in PAIRS), "x.en")
    target = write(tmp_path, "".join(f"{target}\n" for _, target in PAIRS), "x.fr")
    table = write(tmp_path, "en\tfr\n" + "".join(f"{source}\t{target}\n" for source, target in PAIRS), "x.tsv")
    for number, (data, format, reader) in enumerate(
        (
            (source, "parallel", {"target": str(target)}),
            (table, None, {"text": "en", "target": "fr"}),
            (table, None, {"words": "en", "target": "fr"}),
            (table, None, {"pair": ("en", "fr")}),
        )
    ):
        found = align_corpus(data, lens, tmp_path / str(number), format=format, reader=reader)
        assert found.lines == expected
        assert found.every.sure == 0


def test_lines_of_pairs_that_cannot_be_aligned_are_empty(tmp_path: Path) -> None:
    source = write(tmp_path, "the cat sat\n\nthe dog\n", "x.en")
    target = write(tmp_path, "le chat sur un tapis\nle\nle chien sur le chat\n", "x.fr")
    options: dict[str, Any] = {"format": "parallel", "reader": {"target": str(target)}}
    found = align_corpus(source, translator(), tmp_path / "run", **options)
    both = as_lines(one_by_one(translator()))
    assert found.lines == (both[0], "", both[3])
    assert [fault.where for fault in found.faults] == [f"{source}:2"]
    again = align_corpus(source, translator(), tmp_path / "run", **options)
    assert (again.lines, again.summary.computed) == (found.lines, 0)
    assert align_corpus(source, translator(), tmp_path / "one", limit=1, **options).lines == both[:1]


def test_refused(tmp_path: Path) -> None:
    data = gold_file(tmp_path)
    options: dict[str, Any] = {"format": "alignments"}
    with pytest.raises(NormscopeError, match="BERT is not an encoder-decoder"):
        align_corpus(data, toy_lens(), tmp_path / "a", **options)
    with pytest.raises(NormscopeError, match="no target text"):
        align_corpus(data, translator(), tmp_path / "a", reader={"words": "src_words"})
    pairs = {"words": "src_words", "target": "tgt_words"}
    with pytest.raises(NormscopeError, match="no gold links"):
        align_corpus(data, translator(), tmp_path / "a", reader=pairs, gold=True)
    with pytest.raises(NormscopeError, match="Unknown scope"):
        align_corpus(data, translator(), tmp_path / "a", scope="XATN-N", **options)
    with pytest.raises(NormscopeError, match="no layer 2"):
        align_corpus(data, translator(), tmp_path / "a", layer=2, **options)
    with pytest.raises(NormscopeError, match=r"No sentence pair could be aligned.*before the decoder reads"):
        align_corpus(data, translator(), tmp_path / "b", scope="ATTN-N", **options)
    align_corpus(data, translator(), tmp_path / "c", **options)
    with pytest.raises(NormscopeError, match="different model, data or options"):
        align_corpus(data, translator(), tmp_path / "c", threshold=0.5, **options)
