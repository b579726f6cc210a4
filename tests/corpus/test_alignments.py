"""Parallel text with gold links."""

from __future__ import annotations

from pathlib import Path

import pytest

from normscope import NormscopeError
from normscope.corpus import read
from tests.helpers.files import bad, good, real_file, write


def sentences(folder: Path, source: str = "a b c\nd e\n", target: str = "x y\nz\n") -> dict[str, Path]:
    return {"source": write(folder, source, "s.txt"), "target": write(folder, target, "t.txt")}


@pytest.mark.parametrize(
    ("name", "content"), [("x.talp", "1-1 3p2 2-2\r\n\r\n"), ("x.pharaoh", "\ufeff0-0 2?1 1-1 \n\n")]
)
def test_links(tmp_path: Path, name: str, content: str) -> None:
    first, second = (good(entry) for entry in read(write(tmp_path, content, name), **sentences(tmp_path)))
    assert (first.id, first.words, first.target) == (f"{name}:1", ("a", "b", "c"), ("x", "y"))
    assert first.sure == {(0, 0), (1, 1)}
    assert first.possible == {(0, 0), (1, 1), (2, 1)}
    assert (second.words, second.target, second.possible) == (("d", "e"), ("z",), frozenset())


@pytest.mark.parametrize(
    ("notation", "links", "reason"),
    [
        ("talp", "4-1", "word 4 to target word 1 (counted from 1), but there are 3 words and 2"),
        ("talp", "1-3", "word 1 to target word 3"),
        ("talp", "0-1", "words count from 1"),
        ("pharaoh", "3-0", "word 4"),
        ("pharaoh", "0p1", "1-2 or 1?2"),
        ("talp", "1?1", "1-2 or 1p2"),
        ("talp", "1-1-1", "'1-1-1'"),
        ("talp", "1-" + "9" * 5000, "must be written as"),
    ],
)
def test_impossible_links(tmp_path: Path, notation: str, links: str, reason: str) -> None:
    path = write(tmp_path, links + "\n1-1\n" if notation == "talp" else links + "\n0-0\n", "x.links")
    first, second = read(path, "alignments", notation=notation, **sentences(tmp_path))
    assert reason in bad(first).reason
    assert bad(first).where == f"{path}:1"
    assert good(second).sure == {(0, 0)}


def test_damaged_and_empty_sentences_name_their_file(tmp_path: Path) -> None:
    path = write(tmp_path, "1-1\n\n", "x.talp")
    write(tmp_path, b"\xff\nd\n", "s.txt")
    first, second = read(path, source=tmp_path / "s.txt", target=write(tmp_path, "x\n\n", "t.txt"))
    assert bad(first).where == f"{tmp_path / 's.txt'}:1"
    assert "list of target words is empty" in bad(second).reason


def test_files_of_different_lengths(tmp_path: Path) -> None:
    entries = read(write(tmp_path, "1-1\n1-1\n", "x.talp"), **sentences(tmp_path, target="x\n"))
    good(next(entries))
    with pytest.raises(NormscopeError, match=r"t\.txt:2: The file ends here"):
        next(entries)


def test_alignments_need_source_target_and_notation(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="source= and target="):
        read(write(tmp_path, "1-1\n", "x.talp"))
    with pytest.raises(NormscopeError, match="one of talp, pharaoh, jsonl"):
        read(write(tmp_path, "1-1\n", "x.links"), "alignments", **sentences(tmp_path))
    with pytest.raises(NormscopeError, match="No such file"):
        read(write(tmp_path, "1-1\n", "x.talp"), source="no.txt", target="no.txt")


def test_jsonl(tmp_path: Path) -> None:
    rows = [
        '{"src_words": ["a", "b"], "tgt_words": ["x"], "alignment": [[0, 0]], "maybe": [[1, 0]]}',
        '{"src_words": ["a", "b"], "tgt_words": ["x"], "alignment": [[2, 0]], "maybe": []}',
        '{"src_words": ["a", "b"], "tgt_words": ["x"], "alignment": [[0, 0, 0]], "maybe": []}',
        '{"src_words": ["a", "b"], "tgt_words": ["x"], "alignment": [[0.5, 0]], "maybe": []}',
        '{"src_words": [], "tgt_words": ["x"], "alignment": [], "maybe": []}',
        '{"src_words": ["a"], "tgt_words": ["x"], "alignment"',
        '{"src_words": ["a"], "tgt_words": ["x"], "alignment": [[-1, 0]], "maybe": []}',
        '{"src_words": "a b", "tgt_words": "x", "alignment": [], "maybe": []}',
    ]
    path = write(tmp_path, "\n".join(rows), "x.jsonl")
    found = list(read(path, "alignments", possible="maybe"))
    assert good(found[0]).sure == {(0, 0)}
    assert good(found[0]).possible == {(0, 0), (1, 0)}
    reasons = ["word 3", "pairs of integers", "pairs of integers", "list of words is empty", "not valid JSON", "word 0"]
    for number, reason in enumerate(reasons, 2):
        assert reason in bad(found[number - 1]).reason
        assert bad(found[number - 1]).where == f"{path}:{number}"
    assert good(found[7]).words == ("a", "b")
    with pytest.raises(NormscopeError, match="no column 'source'"):
        read(path, "alignments", words="source")
    from_one = write(tmp_path, rows[0].replace("[0, 0]", "[2, 1]"), "y.jsonl")
    assert good(next(read(from_one, "alignments", base=1))).sure == {(1, 0)}


def test_rwth() -> None:
    path = real_file("rwth.alignment.talp")
    found = [good(e) for e in read(path, source=real_file("rwth.de"), target=real_file("rwth.en"))]
    assert len(found) == 508
    assert (sum(len(entry.sure) for entry in found), sum(len(entry.possible) for entry in found)) == (9613, 10_534)


def test_hansards() -> None:
    found = [good(entry) for entry in read(real_file("hansards.en-fr.jsonl"), "alignments")]
    assert len(found) == 484
    assert sum(len(entry.sure) for entry in found) == 4376
