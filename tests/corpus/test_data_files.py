"""Several files, folders, patterns, compressed and remote ones; wrong formats and columns are answered helpfully."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest

from normscope import NormscopeError
from normscope.corpus import read
from tests.helpers.corpus_runs import table_bytes, toy_lines, toy_run
from tests.helpers.files import good, write
from tests.helpers.toys import save_model


def texts(data: Any, *given: Any, **options: Any) -> list[tuple[str, str | None]]:
    return [(good(entry).id, good(entry).text) for entry in read(data, *given, **options)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    write(tmp_path / "tree", "b one\nb two\n", "b.txt")
    write(tmp_path / "tree", "a one\n", "a.txt")
    write(tmp_path / "tree" / "deep", "c one\n", "c.txt")
    write(tmp_path / "tree", "nothing to read", "notes.md")
    return tmp_path / "tree"


def test_a_folder_a_pattern_and_a_list(tree: Path) -> None:
    every = [("a.txt:1", "a one"), ("b.txt:1", "b one"), ("b.txt:2", "b two"), ("c.txt:1", "c one")]
    assert texts(tree) == every
    assert texts(str(tree / "*.txt")) == every[:3]
    assert texts(str(tree / "**" / "*.txt")) == every
    assert texts([tree / "b.txt", str(tree / "deep")]) == every[1:]


def test_files_with_one_name(tree: Path) -> None:
    write(tree / "deep", "other\n", "a.txt")
    assert texts([tree / "a.txt", tree / "deep" / "a.txt"]) == [("tree/a.txt:1", "a one"), ("deep/a.txt:1", "other")]


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    path = write(tmp_path, "one\n", "a[1].txt")
    write(tmp_path, "two\n", "a1.txt")
    assert texts(path) == [("a[1].txt:1", "one")]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda tree: [], "No data was given"),
        (lambda tree: str(tree / "*.csv"), "No file matches the pattern"),
        (lambda tree: [tree / "a.txt", tree / "a.txt"], "given twice"),
        (lambda tree: [tree / "a.txt", write(tree, "{}", "x.jsonl")], "several formats: jsonl, lines"),
        (lambda tree: tree / "missing.txt", "No such file or directory"),
        (lambda tree: [tree / "a.txt", write(tree, "", "empty.txt")], "The file is empty"),
        (lambda tree: write(tree, "x", "odd.dat").rename(tree / "deep" / "odd.dat").parent / "odd.dat", "not clear"),
    ],
)
def test_data_that_cannot_be_read(tree: Path, make: Any, said: str) -> None:
    with pytest.raises(NormscopeError, match=said):
        list(read(make(tree)))


def test_a_folder_without_data(tmp_path: Path) -> None:
    write(tmp_path, "x", "notes.md")
    with pytest.raises(NormscopeError, match=r"no file with a known suffix. It has: \.md"):
        read(tmp_path)


def test_compressed_files(tmp_path: Path) -> None:
    table = "text;label\na cat;1\na dog;0\n"
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(table.encode()))
    assert texts(path, label="label") == [("x.csv.gz:2", "a cat"), ("x.csv.gz:3", "a dog")]
    for content in (gzip.compress(table.encode() * 9)[:-9], b"not compressed at all", b"\x1f\x8b\x08\x00broken......"):
        path.write_bytes(content)
        with pytest.raises(NormscopeError, match="the compressed file is damaged"):
            list(read(path))
    parquet = write(tmp_path, "x", "x.parquet.gz")
    with pytest.raises(NormscopeError, match="decompress it first"):
        read(parquet)


def test_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "x", "x.txt.zst")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(NormscopeError, match="pip install zstandard"):
            read(path)
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.ZstdCompressor().compress(text) for text in (b"one\ntw", b"o\n")]
    path.write_bytes(b"".join(frames))
    assert texts(path) == [("x.txt.zst:1", "one"), ("x.txt.zst:2", "two")]
    path.write_bytes(frames[0][:-3])
    path.write_bytes(b"not compressed")
    with pytest.raises(NormscopeError, match="the compressed file is damaged"):
        list(read(path))


def test_remote_files(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpora/x.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    memory.pipe("/corpora/y.txt.gz", gzip.compress(b"three\n"))
    assert texts("memory://corpora/x.jsonl") == [("x.jsonl:1", "one"), ("x.jsonl:2", "two")]
    assert texts("memory://corpora/y.txt.gz") == [("y.txt.gz:1", "three")]
    with pytest.raises(NormscopeError, match=r"Cannot read memory://corpora/z\.txt"):
        read("memory://corpora/z.txt")
    with pytest.raises(NormscopeError, match=r"Cannot read nowhere://x/y\.txt"):
        read("nowhere://x/y.txt")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(NormscopeError, match="pip install fsspec"):
        read("memory://corpora/x.jsonl")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_of_csv(tmp_path: Path, separator: str) -> None:
    path = write(tmp_path, f"id{separator}text\n7{separator}a cat\n", "x.csv")
    assert texts(path, id="id") == [("7", "a cat")]
    assert texts(path, id="id", delimiter=separator) == [("7", "a cat")]


def test_a_semicolon_in_a_text_is_no_separator(tmp_path: Path) -> None:
    path = write(tmp_path, 'text,label\n"a; b",1\n', "x.csv")
    assert texts(path, label="label") == [("x.csv:2", "a; b")]


def test_a_missing_column_is_answered_with_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "sentence;label\na cat;1\n", "x.csv")
    with pytest.raises(NormscopeError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path}:1: There is no column 'text'. The columns are 'sentence', 'label'; name the ones to read, such as "
        "text='sentence'."
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n', 'It begins with \'{"text": "a"}\', which looks like jsonl.'),
        (b"text\tlabel\n", "which looks like tsv (separated by tabs)"),
        (b"text;label\n", "which looks like csv with delimiter=';'"),
        (b"PAR1....", "It looks like parquet."),
        (b"\xff\xfe\x00", "It is not UTF-8 text."),
        (b"", "is not clear from its suffix. Use format="),
    ],
)
def test_a_format_that_is_not_clear(tmp_path: Path, content: bytes, said: str) -> None:
    path = write(tmp_path, content, "x.data")
    with pytest.raises(NormscopeError) as caught:
        read(path)
    assert said in str(caught.value)
    assert "Use format= with one of lines" in str(caught.value)


def test_a_format_that_reads_nothing_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path, "text,label\na cat,1\n", "x.csv")
    model = save_model(tmp_path / "model", max_position_embeddings=24)
    with pytest.raises(NormscopeError, match=r"None of the 2 entries .* could be read.*not valid JSON.*looks like csv"):
        toy_run(data, model, tmp_path / "run", format="jsonl")
    assert not (tmp_path / "run").exists()


def test_a_run_over_several_files(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", max_position_embeddings=24)
    for number in range(3):
        write(tmp_path, "\n".join(toy_lines(3, number)), f"part{number}.txt")
    pattern = str(tmp_path / "part*.txt")
    toy_run(pattern, model, tmp_path / "run")
    files = [tmp_path / f"part{number}.txt" for number in range(3)]
    assert toy_run(files, model, tmp_path / "run").computed == 0
    toy_run(files, model, tmp_path / "list")
    assert table_bytes(tmp_path / "list") == table_bytes(tmp_path / "run")
    write(tmp_path, "the cat", "part1.txt")
    with pytest.raises(NormscopeError, match=r"data\.entries: was 9, is 7.*the file part1\.txt changed"):
        toy_run(pattern, model, tmp_path / "run")
