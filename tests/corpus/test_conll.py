"""CoNLL columns with entities, and CoNLL-U."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope import NormscopeError
from normscope.corpus import Entity, read
from normscope.corpus.readers.iob import entities_from_iob_tags, guess_iob_scheme
from tests.helpers.files import bad, good, real_file, write


def sentences(*tags: str) -> str:
    """Sentences with the given tags, a word each."""
    return "\n".join("".join(f"w{n} X {tag}\n" for n, tag in enumerate(row.split())) for row in tags)


IOB1 = ["I-PER I-PER O I-LOC", "I-ORG B-ORG I-ORG I-PER", "O O"]
IOB2 = ["B-PER I-PER O B-LOC", "B-ORG B-ORG I-ORG B-PER", "O O"]
FOUND = [
    (Entity(0, 2, "PER"), Entity(3, 4, "LOC")),
    (Entity(0, 1, "ORG"), Entity(1, 3, "ORG"), Entity(3, 4, "PER")),
    (),
]


@pytest.mark.parametrize(("tags", "scheme"), [(IOB1, "iob1"), (IOB2, "iob2")])
def test_both_schemes_by_name_and_detected(tmp_path: Path, tags: list[str], scheme: str) -> None:
    path = write(tmp_path, sentences(*tags), "x.conll")
    for given_scheme in (scheme, None):
        assert [good(entry).entities for entry in read(path, scheme=given_scheme)] == FOUND
    other = {"iob1": "iob2", "iob2": "iob1"}[scheme]
    assert [bad(entry).where for entry in list(read(path, scheme=other))[:2]] == [f"{path}:1", f"{path}:6"]


def test_impossible_spans_are_faults_of_their_line(tmp_path: Path) -> None:
    path = write(tmp_path, sentences("O I-PER", *IOB2, "B-PER I-LOC", "B-", "S-PER", "PER"), "x.conll")
    found = list(read(path))
    assert [bad(found[n]).where for n in (0, 4, 5, 6, 7)] == [f"{path}:{line}" for line in (2, 18, 20, 22, 24)]
    assert "in IOB2 an entity begins with B-PER" in bad(found[0]).reason
    assert "I-LOC does not follow another LOC" in bad(found[4]).reason
    assert "must be O, B-label or I-label" in bad(found[5]).reason
    assert [good(entry).entities for entry in found[1:4]] == FOUND


def test_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "O\tword one\tx\nB-A\tb\ty\n\nO\tc\n\nO\td\tx\n", "x.conll")
    first, second, third = read(path, word_column=1, tag_column=0)
    assert good(first).words == ("word one", "b")
    assert good(first).entities == (Entity(1, 2, "A"),)
    assert bad(second).where == f"{path}:4"
    assert bad(second).reason == "The line has 2 columns, expected 3."
    assert good(third).id == "x.conll:6"
    assert good(next(read(path, tag_column=None, word_column=-1))).words == ("x", "y")
    for options in ({"word_column": 3}, {"tag_column": -4}):
        with pytest.raises(NormscopeError, match=r"x\.conll:1: There are 3 columns"):
            read(path, **options)
    with pytest.raises(NormscopeError, match="Unknown scheme"):
        read(path, scheme="bioes")


def test_a_malformed_first_line(tmp_path: Path) -> None:
    first, second = read(write(tmp_path, "a\nb O\n\nc O\nd O\n", "x.conll"))
    assert bad(first).reason == "The line has 1 columns, expected 2."
    assert good(second).words == ("c", "d")


def test_documents_byte_order_mark_crlf_and_damage(tmp_path: Path) -> None:
    start = "-DOCSTART- -X- O"
    text = f"{start}\n\na X O\n{start}\nb X O\n\n\n\nc X O\ne\ufffd X O\n\nf X O\n{start}"
    content = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode().replace("\ufffd".encode(), b"\xe9")
    path = write(tmp_path, content, "x.conll")
    a, b, c, f = read(path)
    assert (good(a).words, good(b).words, good(f).words) == (("a",), ("b",), ("f",))
    assert (bad(c).id, bad(c).where) == ("x.conll:9", f"{path}:10")
    path = write(tmp_path, "c\u00a0d O\n", "x.conll")
    assert good(next(read(path))).words == ("c\u00a0d",)


def test_document_marks_alone_are_not_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="contains no entries"):
        read(write(tmp_path, "-DOCSTART- O\n\n", "x.conll"))


TAGGED = st.lists(st.tuples(st.sampled_from(["A", "B", "", ""]), st.integers(1, 3)), max_size=8)


@given(parts=TAGGED)
def test_schemes_round_trip(parts: list[tuple[str, int]]) -> None:
    expected: list[Entity] = []
    iob1: list[str] = []
    iob2: list[str] = []
    before = ""
    for label, length in parts:
        if label:
            expected.append(Entity(len(iob1), len(iob1) + length, label))
            iob1 += ["B-" + label if before == label else "I-" + label] + ["I-" + label] * (length - 1)
            iob2 += ["B-" + label] + ["I-" + label] * (length - 1)
        else:
            iob1 += ["O"] * length
            iob2 += ["O"] * length
        before = label
    assert entities_from_iob_tags(iob1, "iob1") == entities_from_iob_tags(iob1, None) == tuple(expected)
    assert entities_from_iob_tags(iob2, "iob2") == entities_from_iob_tags(iob2, None) == tuple(expected)
    assert guess_iob_scheme([iob1]) == ("iob1" if expected else None)
    assert guess_iob_scheme([iob2]) == ("iob2" if expected else None)


def rows(*cells: str) -> str:
    """CoNLL-U lines, each from "id form"; comments are kept."""
    return "".join(c + "\n" if c.startswith("#") else "\t".join(c.split(" ") + ["_"] * 8) + "\n" for c in cells)


CONLLU = rows("# sent_id = fr-1", "# text = Il  va du bois.")
CONLLU += rows("1 Il", "2 va", "2.1 e", "3-4 du", "3 de", "4 le", "5 bois", "6 .")


def test_conllu(tmp_path: Path) -> None:
    path = write(tmp_path, CONLLU + "\n" + rows("0.1 e", "1 a", "2 b") + "\n# a comment\n", "x.conllu")
    first, second = (good(entry) for entry in read(path))
    assert (first.id, first.words) == ("fr-1", ("Il", "va", "du", "bois", "."))
    assert [(first.surface or "")[start:end] for start, end in first.spans] == list(first.words or ())
    assert (second.id, second.words, second.surface, second.spans) == ("x.conllu:12", ("a", "b"), None, ())
    parts = good(next(read(path, syntactic=True)))
    assert parts.words == ("Il", "va", "de", "le", "bois", ".")
    assert parts.spans[2] == parts.spans[3] == first.spans[2]
    assert good(list(read(path, syntactic=True))[1]).words == ("a", "b")


@pytest.mark.parametrize(
    ("cells", "line", "reason"),
    [
        (["1 a", "3 b"], 2, "expected 2"),
        (["1 a", "x b"], 2, "must have the form"),
        (["1 a", "1-" + "9" * 5000 + " b"], 2, "must have the form"),
        (["1 a b", "2 b"], 1, "11 columns"),
        (["1-3 a", "1 b", "2 c"], 3, "inside the multiword token"),
        (["2-1 a", "1 b"], 1, "expected 1"),
        (["1-2 a", "1 b", "2-3 c", "2 d", "3 e"], 3, "empty or nested"),
        (["# text = a c", "1 a", "2 b"], 3, "'b' does not come next"),
        (["# text = a b c", "1 a", "2 b"], 3, "continues with 'c'"),
    ],
)
def test_conllu_malformed(tmp_path: Path, cells: list[str], line: int, reason: str) -> None:
    path = write(tmp_path, rows(*cells) + "\n" + rows("1 fine"), "x.conllu")
    first, second = read(path)
    assert reason in bad(first).reason
    assert bad(first).where == f"{path}:{line}"
    assert good(second).words == ("fine",)


def test_conllu_crlf_byte_order_mark_and_damage(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + (CONLLU + "\n" + rows("1 ?")).replace("\n", "\r\n").encode().replace(b"?", b"\xff")
    path = write(tmp_path, content, "x.conllu")
    first, second = read(path)
    assert (good(first).id, good(first).surface) == ("fr-1", "Il  va du bois.")
    assert bad(second).where == f"{path}:12"


def test_conll2003() -> None:
    found: list[Any] = [good(entry) for entry in read(real_file("conll2003.eng.testa"), "conll")]
    assert len(found) == 3250
    assert sum(len(entry.words) for entry in found) == 51_362
    labels = Counter(entity.label for entry in found for entity in entry.entities)
    assert labels == {"PER": 1842, "LOC": 1837, "ORG": 1341, "MISC": 922}
