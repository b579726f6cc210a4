"""Plain text: encodings, lines, paragraphs, paragraph pairs; how `read` chooses a format and refuses files."""

from __future__ import annotations

import os
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normscope import NormscopeError
from normscope.corpus import FORMATS, Entry, Fault, read, strict
from normscope.corpus.readers.paragraph_pairs import cut_paragraph_pair, paragraph_pairs_heading_level
from tests.helpers.files import bad, good, real_file, write
from tests.helpers.toys import letters_tokenizer


def texts(path: Path, *args: Any, **options: Any) -> list[str]:
    return [good(entry).text or "" for entry in read(path, *args, **options)]


def test_lines(tmp_path: Path) -> None:
    entries = list(read(write(tmp_path, "one\n\n  \n two words \nthree")))
    assert [(good(entry).id, good(entry).text) for entry in entries] == [
        ("x.txt:1", "one"),
        ("x.txt:4", "two words"),
        ("x.txt:5", "three"),
    ]


def test_paragraphs(tmp_path: Path) -> None:
    path = write(tmp_path, "\na\nb \n\n \n\nc\n")
    assert [(good(e).id, good(e).text) for e in read(path, "paragraphs")] == [("x.txt:2", "a b"), ("x.txt:7", "c")]


@pytest.mark.parametrize("format", ["lines", "paragraphs"])
def test_crlf_and_byte_order_mark(tmp_path: Path, format: str) -> None:
    assert texts(write(tmp_path, b"\xef\xbb\xbfa\r\n\r\nb\r\n"), format) == ["a", "b"]


def test_invalid_utf8_is_a_fault_of_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, b"fine\ncaf\xe9 au lait\nfine too\n")
    first, second, third = read(path)
    assert (good(first).text, good(third).text) == ("fine", "fine too")
    assert bad(second) == Fault("x.txt:2", f"{path}:2", "The byte 0xe9 at position 4 of the line is not UTF-8.")
    with pytest.raises(NormscopeError, match=r"x\.txt:2: The byte 0xe9"):
        list(strict(read(path)))
    (paragraph,) = read(path, "paragraphs")
    assert bad(paragraph).where == f"{path}:2"
    assert paragraph.id == "x.txt:1"


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"huggingface"}))
@pytest.mark.parametrize("content", [b"", b"a\0\xff\n", "äö".encode("utf-16")], ids=["empty", "binary", "utf-16"])
def test_wrong_files_are_refused_at_once(tmp_path: Path, format: str, content: bytes) -> None:
    path = write(tmp_path, content)
    options = {"notation": "talp", "source": path, "target": path} if format == "alignments" else {}
    with pytest.raises(NormscopeError, match=r"x\.txt"):
        read(path, format, **options)


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"huggingface"}))
def test_missing_files_and_folders_are_refused_at_once(tmp_path: Path, format: str) -> None:
    options = {"notation": "talp", "source": "s", "target": "t"} if format == "alignments" else {}
    with pytest.raises(NormscopeError, match="No such file"):
        read(tmp_path / "no.txt", format, **options)
    with pytest.raises(NormscopeError, match="folder"):
        read(tmp_path, format, **options)


def test_blank_files_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="contains no entries"):
        read(write(tmp_path, "\n \n\r\n"))
    with pytest.raises(NormscopeError, match="contains no entries"):
        read(write(tmp_path, "\n \n\r\n", "x.csv"))


def test_read_says_how_to_name_a_format(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match=r"Use format= with one of lines, paragraphs.*conllu"):
        read(write(tmp_path, "a", "x.testa"))
    with pytest.raises(NormscopeError, match="Unknown format 'line'"):
        read(write(tmp_path, "a"), "line")
    with pytest.raises(NormscopeError, match="format='huggingface'"):
        read("someone/something")


@pytest.mark.parametrize(
    ("format", "known"),
    [("lines", "none"), ("pairs", "tokenizer, max_tokens, overlap"), ("tsv", "header, quoting, text, pair")],
)
def test_read_names_the_options_of_a_format(tmp_path: Path, format: str, known: str) -> None:
    with pytest.raises(NormscopeError, match=f"no option colour. It takes {known}"):
        read(write(tmp_path, "a"), format, colour="red")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize(
    ("format", "line", "most"),
    [
        ("lines", "a word of text\n", 20_000),
        ("jsonl", '{"text": "a"}\n', 20_000),
        ("csv", "text\n", 30_000),
        ("conll", "a O\n\n", 30_000),
        ("conllu", "1\ta" + "\t_" * 8 + "\n\n", 20_000),
        ("pairs", "a paragraph\n\n", 20_000),
    ],
)
def test_readers_take_no_more_than_asked(tmp_path: Path, format: str, line: str, most: int) -> None:
    """From an endless pipe: no more is written than was read and fits into buffers."""
    path = tmp_path / "endless"
    os.mkfifo(path)
    written = 0

    def endless() -> None:
        nonlocal written
        try:
            with path.open("w", buffering=1) as file:
                while True:
                    file.write(line)
                    written += 1
        except BrokenPipeError:
            pass

    writer = threading.Thread(target=endless, daemon=True)
    writer.start()
    entries = read(path, format)
    assert len(list(islice(entries, 3))) == 3
    del entries  # closes the file
    writer.join(timeout=180)
    assert not writer.is_alive()
    assert written < most + 5


WIKI = """
 = First article = \n
 \n
 One . \n
 Two . \n
 \n
 = = Section = = \n
 \n
 Three . \n
 = Second article = \n
 \n
 Four . \n
 Five . \n
 Six . \n
""".replace("\n\n", "\n")


@pytest.mark.parametrize("text", [WIKI, WIKI.replace("\n", "\r\n\r\n")], ids=["as distributed", "blank lines"])
def test_pairs_are_of_one_article(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert [good(entry).pair for entry in read(path, "pairs")] == [("One .", "Two ."), ("Four .", "Five .")]
    assert [good(entry).pair for entry in read(path, "pairs", overlap=True)] == [
        ("One .", "Two ."),
        ("Two .", "Three ."),
        ("Four .", "Five ."),
        ("Five .", "Six ."),
    ]


def test_escapes_of_wikitext_are_undone_in_pairs(tmp_path: Path) -> None:
    lines = " = A = \n The mid @-@ 20th century had 1 @,@ 500 people , 2 @.@ 5 % of all . \n a @ b @-@\n"
    path = write(tmp_path, lines)
    (entry,) = read(path, "pairs")
    assert good(entry).pair == ("The mid-20th century had 1,500 people , 2.5 % of all .", "a @ b @-@")
    assert "mid @-@ 20th" in texts(path)[1]  # other readers leave the text as it is


def test_pairs_of_plain_paragraphs(tmp_path: Path) -> None:
    (entry,) = read(write(tmp_path, "one\ntwo\n\nthree\nfour\n\nfive\n"), "pairs")
    assert good(entry).pair == ("one two", "three four")
    assert entry.id == "x.txt:1"


def test_a_damaged_paragraph_is_not_a_neighbour(tmp_path: Path) -> None:
    first, second = read(write(tmp_path, b"a\n\n\xff\n\nb\n\nc\n"), "pairs")
    assert bad(first).reason.startswith("The byte 0xff")
    assert good(second).pair == ("b", "c")


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (" = A title = ", 1),
        (" = = = A = B = = = ", 3),
        (" = = Uneven = ", 0),
        ("x = 3", 0),
        (" = = ", 0),
        ("= 3 = 4", 0),
        ("", 0),
    ],
)
def test_headings(text: str, level: int) -> None:
    assert paragraph_pairs_heading_level(text) == level


WORDS = st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=30).map(" ".join)


@given(a=WORDS, b=WORDS, limit=st.integers(5, 60))
def test_cut_pairs_fill_the_room_and_both_keep_something(a: str, b: str, limit: int) -> None:
    tokenizer = letters_tokenizer()
    whole, cut = tokenizer(a, b)["input_ids"], cut_paragraph_pair((a, b), tokenizer, limit)
    assert len(tokenizer(*cut)["input_ids"]) == min(len(whole), limit)
    for text, kept in zip((a, b), cut, strict=True):
        assert text.startswith(kept)
        room = (limit - 3) // 2
        assert len(kept.replace(" ", "")) >= min(room, len(text.replace(" ", "")))
    assert cut == cut_paragraph_pair((a, b), tokenizer, limit)


def test_pairs_are_cut_by_the_tokenizer_given(tmp_path: Path) -> None:
    path = write(tmp_path, "abcdef ghi\n\nabc def\n")
    (entry,) = read(path, "pairs", tokenizer=letters_tokenizer(), max_tokens=9)
    assert good(entry).pair == ("abc", "abc")
    with pytest.raises(NormscopeError, match="at least 5"):
        read(path, "pairs", tokenizer=letters_tokenizer(), max_tokens=4)
    with pytest.raises(NormscopeError, match="fast tokenizer"):
        read(path, "pairs", tokenizer=object())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.binary(max_size=200))
@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"huggingface", "parquet"}))
def test_arbitrary_bytes_give_entries_faults_or_one_error(tmp_path: Path, format: str, content: bytes) -> None:
    path = write(tmp_path, content)
    options = {"notation": "talp", "source": path, "target": path} if format == "alignments" else {}
    try:
        found = list(read(path, format, **options))
    except NormscopeError:
        return
    assert all(isinstance(entry, Entry | Fault) for entry in found)


def test_wikitext() -> None:
    path = real_file("wikitext2.raw.test.txt")
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(_default_model())
    pairs = [good(entry).pair or ("", "") for entry in islice(read(path, "pairs", tokenizer=tokenizer), 100)]
    assert len(list(read(path, "pairs"))) == 1074
    assert not any(paragraph_pairs_heading_level(text) for pair in pairs for text in pair)
    lengths = [len(tokenizer(*pair)["input_ids"]) for pair in pairs]
    assert max(lengths) == 128
    assert sum(length == 128 for length in lengths) > 50


def _default_model() -> str:
    from normscope import default_model

    try:
        return str(default_model.find())
    except NormscopeError as error:
        pytest.skip(str(error))
