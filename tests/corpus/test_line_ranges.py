"""Shards planned by line are those that the reader gives, whatever is in the files; digests tell contents apart."""

from __future__ import annotations

import pickle
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope import NormscopeError, corpus
from normscope.corpus import line_ranges
from normscope.corpus.entries import Fault
from normscope.corpus.line_ranges import can_plan_lines, plan_lines
from normscope.corpus.readers.data_files import RemoteFile
from normscope.corpus.shards import split_into_shards
from tests.helpers.corpus_runs import toy_corpus, toy_run
from tests.helpers.toys import save_model

PIECES = [
    b"a",
    b"the cat",
    b" ",
    b"\t",
    b"\xc2\xa0",
    b"\xe3\x80\x80",
    b"\xe2\x80\x83x",
    b"\xe4\xb8\xad",
    b"\xff",
    b"\xc2",
]
ENDS = [b"\n", b"\r\n", b"\n\n", b" \n", b"\x1c\n"]
LINES = st.lists(
    st.tuples(st.lists(st.sampled_from(PIECES), max_size=3).map(b"".join), st.sampled_from(ENDS)), max_size=9
)
CONTENTS = LINES.map(lambda lines: b"".join(part for line in lines for part in line))


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.booleans(), CONTENTS, st.sampled_from([b"x", b"\xff", b"last\n"])), min_size=1, max_size=3),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(5, 40),
)
def test_shards_are_those_of_the_reader(contents: Any, size: int, limit: int | None, block: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_ranges, "BLOCK", block)
        files = [Path(folder) / str(n) / "text.txt" for n in range(len(contents))]
        for file, (mark, content, last) in zip(files, contents, strict=True):
            file.parent.mkdir()
            file.write_bytes(b"\xef\xbb\xbf" * mark + content + last)
        whole = list(islice(corpus.read(files), limit))
        plan, digest, _ = plan_lines(files, size, limit, 0)
        made = [(n, pickle.loads(pickle.dumps(plan.shard(n))).read()) for n in range(len(plan.file_of))]
        assert made == list(split_into_shards(whole, size))
        assert plan.entries == len(whole)
        faults = [str(entry) for entry in whole if isinstance(entry, Fault)]
        assert (plan.faults, plan.first_fault) == (len(faults), faults[0] if faults else "")
        for earlier in range(1, len(whole) + 1):
            _, now, before = plan_lines(files, size, limit, earlier)
            assert now == digest
            assert before == plan_lines(files, size, earlier, 0)[1]  # as a run with this limit


def test_digests_differ_with_the_content(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    digests = set()
    for content in (b"a\nb\n", b"a\nc\n", b"b\na\n", b"a\n\nb\n", b"a b\n", b"a\nb\nc\n"):
        path.write_bytes(content)
        digests.add(plan_lines([path], 2, None, 0)[1])
    assert len(digests) == 6
    path.write_bytes(b"a\nb")
    same = plan_lines([path], 2, None, 0)[1]
    path.write_bytes(b"a\nb\n\n \n")
    assert plan_lines([path], 2, None, 0)[1] == same  # nothing after the last entry counts
    other = tmp_path / "other.txt"
    other.write_bytes(b"a\nb")
    assert plan_lines([other], 2, None, 0)[1] != same  # ids begin with the name


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "The file is empty"),
        (b"\n \n", "contains no entries"),
        (b"a\0b\n", "binary data"),
        (b"\xff\xfea\0\n", "UTF-16"),
    ],
)
def test_files_that_cannot_be_planned(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    for attempt in (lambda: plan_lines([path], 2, None, 0), lambda: list(corpus.read(path))):
        with pytest.raises(NormscopeError, match=said):
            attempt()


def test_what_is_planned_by_line(tmp_path: Path) -> None:
    path = toy_corpus(tmp_path)
    assert can_plan_lines("lines", [path])
    assert not can_plan_lines("jsonl", [path])
    assert not can_plan_lines("lines", [tmp_path / "x.txt.gz"])
    assert not can_plan_lines("lines", [Path("/dev/null")])  # as a pipe, it cannot be read from the middle


def test_a_file_that_changes_during_a_run_is_noticed(tmp_path: Path) -> None:
    path = toy_corpus(tmp_path)
    plan, _, _ = plan_lines([path], 4, None, 0)
    path.write_text("shorter\n")
    with pytest.raises(NormscopeError, match="is not what it was when the run began"):
        plan.shard(1).read()
    assert not plan.shard(1).is_readable()


def test_remote_files_are_read_from_the_middle(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    local = toy_corpus(tmp_path, 10)
    store = fsspec.filesystem("memory")
    store.pipe("/line_ranges/data.txt", local.read_bytes())
    try:
        remote = RemoteFile("memory://line_ranges/data.txt")
        assert can_plan_lines("lines", [remote])
        plan, digest, _ = plan_lines([remote], 4, None, 0)
        assert digest == plan_lines([local], 4, None, 0)[1]
        assert [plan.shard(n).read() for n in range(3)] == [one for _, one in split_into_shards(corpus.read(local), 4)]
        assert plan.shard(2).is_readable()
    finally:
        store.rm("/line_ranges", recursive=True)
    assert not plan.shard(2).is_readable()


def test_a_run_makes_no_entries_to_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run of plain lines does not read them one by one again."""
    data, model = toy_corpus(tmp_path), save_model(tmp_path / "model", max_position_embeddings=24)
    toy_run(data, model, tmp_path / "run")

    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("entries were made")

    monkeypatch.setattr(line_ranges, "line_entry", refuse)
    monkeypatch.setattr("normscope.corpus.run_manifest.read", refuse)
    assert toy_run(data, model, tmp_path / "run").computed == 0
