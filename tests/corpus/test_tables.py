"""JSONL, CSV, TSV, Parquet and Hugging Face datasets."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normscope import NormscopeError
from normscope.corpus import read
from tests.helpers.files import bad, good, real_file, write

JSONL = b"""\xef\xbb\xbf{"text": "one", "label": 1, "id": "a"}\r
\r
{"text": "two", "label": null, "id": 7}\r
{"text": "thr\r
["text"]\r
{"label": 1, "id": "b"}\r
{"text": 3, "id": "c"}\r
{"text": "x", "id": ""}\r
{"text": "\xff"}\r
{"text": "\\ud800", "id": "d"}\r
{"text": " ", "id": "e"}\r
{"text": "six", "id": "f"}\r
"""


def test_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path, JSONL, "x.jsonl")
    found = list(read(path, label="label", id="id"))
    assert [(good(found[n]).id, good(found[n]).text, good(found[n]).label) for n in (0, 1, -1)] == [
        ("a", "one", "1"),
        ("7", "two", None),
        ("f", "six", None),
    ]
    faults = [bad(fault) for fault in found[2:-1]]
    assert [fault.where for fault in faults] == [f"{path}:{number}" for number in range(4, 12)]
    reasons = ["not valid JSON", "JSON object", "'text' is missing", "must hold text", "must hold an id"]
    reasons += ["0xff", "surrogate", "empty"]
    assert [reason in fault.reason for reason, fault in zip(reasons, faults, strict=True)] == [True] * 8
    assert "column" in faults[0].reason
    assert good(next(read(path))).id == "x.jsonl:1"


def test_jsonl_nested_too_deeply_or_with_long_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "[" * 100_000 + "\n" + '{"text": ' + "1" * 5000 + "}\n", "x.jsonl")
    for entry in read(path):
        assert "nested too deeply, or contains a number" in bad(entry).reason


def test_pairs_words_and_targets(tmp_path: Path) -> None:
    path = write(tmp_path, '{"a": "x y", "b": "z", "w": ["v", "w"]}\n{"a": "x", "b": " ", "w": [1]}', "x.jsonl")
    first, second = read(path, pair=("a", "b"))
    assert good(first).pair == ("x y", "z")
    assert "empty" in bad(second).reason
    first, second = read(path, words="w", target="a")
    assert (good(first).words, good(first).target) == (("v", "w"), "x y")
    assert "must hold words, not a list of int" in bad(second).reason
    assert good(next(read(path, text="b", target="w"))).target == ("v", "w")
    assert good(next(read(path, words="a"))).words == ("x", "y")
    with pytest.raises(NormscopeError, match="not several"):
        read(path, text="a", words="w")
    with pytest.raises(NormscopeError, match="two columns"):
        read(path, pair=["a"])
    with pytest.raises(NormscopeError, match="a list of names or none, not 'a'"):
        read(path, pair="a")


CSV = 'id,sentence,gold\r\n1,"a, ""b""",x\r\n\r\n2,"two\r\nlines",y\r\n3,short\r\n4,one,too,many\r\n5,last,z\r\n'


def test_csv(tmp_path: Path) -> None:
    path = write(tmp_path, CSV, "x.csv")
    first, second, short, long, last = read(path, text="sentence", label="gold")
    assert (good(first).text, good(first).label, first.id) == ('a, "b"', "x", "x.csv:2")
    assert (good(second).text, second.id) == ("two\nlines", "x.csv:4")
    assert bad(short).where == f"{path}:6"
    assert "2 columns, expected 3: id, sentence, gold" in bad(short).reason
    assert "4 columns, expected 3" in bad(long).reason
    assert (good(last).text, last.id) == ("last", "x.csv:8")
    assert good(next(read(path, text="sentence", id="id"))).id == "1"


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
def test_a_missing_column_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "x.parquet":
        pytest.importorskip("polars").DataFrame({"sentence": ["a"], "gold": [1]}).write_parquet(path)
    else:
        write(tmp_path, "sentence,gold\na,1\n" if name == "x.csv" else '{"sentence": "a", "gold": 1}\n', name)
    with pytest.raises(NormscopeError, match=r"no column 'text'. The columns are 'sentence', 'gold'"):
        read(path)
    assert good(next(read(path, text="sentence", label="gold"))).label == "1"


def test_csv_headers(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match=r"x\.csv:1: There are several columns 'text'"):
        read(write(tmp_path, "text,text\na,b\n", "x.csv"))
    with pytest.raises(NormscopeError, match="contains no entries"):
        read(write(tmp_path, "text\n", "x.csv"))
    with pytest.raises(NormscopeError, match=r"x\.csv:1: The byte 0xff"):
        read(write(tmp_path, b"text,\xff\na,b\n", "x.csv"))
    path = write(tmp_path, "a;1\nb;2\n", "x.csv")
    assert [good(e).id for e in read(path, header=["text", "label"], delimiter=";")] == ["x.csv:1", "x.csv:2"]
    with pytest.raises(NormscopeError, match="one character"):
        read(path, delimiter=";;")


def test_csv_goes_on_after_damage(tmp_path: Path) -> None:
    content = b'text\n\xe9\n"a"b\n"two\n\xe9 lines"\nfine\n' + b"x" * 200_000 + b'\nfine\n"never closed\n\n'
    path = write(tmp_path, content, "x.csv")
    found = list(read(path))
    wheres = [f"{path}:{number}" for number in (2, 3, 5, 7, 9)]
    assert [bad(found[n]).where for n in (0, 1, 2, 4, 6)] == wheres
    assert [good(found[n]).id for n in (3, 5)] == ["x.csv:6", "x.csv:8"]
    assert len(found) == 7


def test_tsv_leaves_quotation_marks_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 'text\tlabel\n" begun\t1\nended "\t0\n', "x.tsv")
    assert [good(entry).text for entry in read(path)] == ['" begun', 'ended "']
    path = write(tmp_path, 'text\tlabel\n"a\tb"\t1\n', "x.tsv")
    assert good(next(read(path, quoting=True))).text == "a\tb"


def test_parquet(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    path = tmp_path / "x.parquet"
    table = {"text": [f"t{n}" for n in range(20_000)], "n": range(20_000), "words": [["a", "b"]] * 20_000}
    table["text"][3] = None  # type: ignore[index]
    polars.DataFrame(table).write_parquet(path, row_group_size=5000)
    found = list(read(path, label="n"))
    assert len(found) == 20_000
    assert bad(found.pop(3)).where == f"{path}:4"
    assert [good(entry).label for entry in found] == [str(n) for n in range(20_000) if n != 3]
    assert (good(found[-1]).text, found[-1].id) == ("t19999", "x.parquet:20000")
    assert good(next(read(path, words="words"))).words == ("a", "b")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NormscopeError, match=r"Cannot read .*x\.parquet as Parquet"):
        read(path)


def test_parquet_without_polars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "polars")
    with pytest.raises(NormscopeError, match=r"normscope\[corpus\]"):
        read(write(tmp_path, "PAR1", "x.parquet"))


def test_huggingface(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, **options: Any) -> Iterator[dict[str, Any]]:
        asked.append((name, config, options))
        if name != "glue":
            raise ConnectionError("The hub is away.")
        return ({"sentence": f"s{n}", "label": n % 2} for n in range(10**9))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    entries = read("glue", "huggingface", config="sst2", text="sentence", label="label")
    assert (good(next(entries)).id, good(next(entries)).text) == ("glue/validation:1", "s1")
    assert asked == [("glue", "sst2", {"split": "validation", "revision": None, "streaming": True})]
    with pytest.raises(NormscopeError, match="no column 'text'"):
        read("glue", "huggingface")
    with pytest.raises(NormscopeError, match=r"'other'.*The hub is away"):
        read("other", "huggingface")


def test_huggingface_without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "datasets")
    with pytest.raises(NormscopeError, match="pip install datasets"):
        read("glue", "huggingface")


def test_sst2() -> None:
    entries = [good(entry) for entry in read(real_file("sst2.dev.tsv"), label="label")]
    assert len(entries) == 872
    assert sum(entry.label == "1" for entry in entries) == 444


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(builtins, "__import__", importing)
