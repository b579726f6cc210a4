"""`normscope align`: links on standard output or in a file, error rates, and runs that are resumed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from normscope import cli
from normscope.corpus import word_links
from normscope.corpus.runner import run as corpus_run
from tests.helpers.files import write
from tests.helpers.toys import translator

LINKS = '{"src_words": ["the", "cat"], "tgt_words": ["le", "chat"], "alignment": [[0, 0]]}\n'


@pytest.fixture(autouse=True)
def lens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli.loading, "load_analyzer", lambda *_: translator())
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "the cat\na dog sat\n", "x.en")
    write(tmp_path, "le chat\nun chien\n", "x.fr")
    write(tmp_path, LINKS, "gold.jsonl")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["align", *arguments])


def test_links_are_printed() -> None:
    result = run("x.en", "x.fr")
    assert result.exit_code == 0, result.output
    expected = [str(translator().analyze(s, text_target=t).alignments().pharaoh) for s, t in (  # type: ignore[union-attr]
        ("the cat", "le chat"), ("a dog sat", "un chien"))]  # fmt: skip
    assert result.stdout.splitlines() == expected
    assert "2 sentence pairs" in result.stderr
    assert "XATTN-N in layer 1, AWI (rows that read a word)" in result.stderr


def test_a_file_and_error_rates(tmp_path: Path) -> None:
    given = ("--layer", "2", "--setting", "AWO", "--threshold", "0.2", "--symmetrise", "union")
    result = run("gold.jsonl", "--format", "alignments", "--gold", "-o", "x.links", *given)
    assert result.exit_code == 0, result.output
    found = word_links.align_corpus(
        "gold.jsonl", translator(), tmp_path / "run", layer=1, setting="AWO", threshold=0.2, symmetrise="union",
        format="alignments",
    )  # fmt: skip
    assert Path("x.links").read_text() == f"{found.lines[0]}\n"
    assert f"all target words: AER {100 * found.every.aer:.1f} %" in result.output
    assert f"linked target words: AER {100 * found.linked.aer:.1f} %" in result.output
    assert "layer 2, AWO (rows that write a word)" in result.output
    assert not list(tmp_path.glob(".x.links*"))


def test_a_stopped_run_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def first_shard(*given: object, **options: object) -> object:
        """Stops after the first of two shards, as Ctrl-C would; not when resumed."""
        return corpus_run(*given, **options | {"shard_size": 1, "progress": stop})  # type: ignore[arg-type]

    calls: list[int] = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if calls == [0, 1]:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(word_links, "run", first_shard)
    stopped = run("x.en", "x.fr", "-o", "x.links")
    assert (stopped.exit_code, Path("x.links").exists()) == (130, False)
    assert "stopped after 1 of 2 sentence pairs" in stopped.stderr
    assert "again to resume" in stopped.stderr
    done = run("x.en", "x.fr", "-o", "x.links")
    assert done.exit_code == 0, done.output
    assert Path("x.links").read_text() == run("x.en", "x.fr").stdout
    assert not list(tmp_path.glob(".x.links*"))


def test_a_pair_that_cannot_be_aligned(tmp_path: Path) -> None:
    write(tmp_path, "le chat\n\n", "x.fr")
    result = run("x.en", "x.fr", "-o", "x.links")
    assert result.exit_code == 3
    assert Path("x.links").read_text().splitlines()[1] == ""
    assert "The target text is empty" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x.en",), "The format of x.en is not clear"),
        (("x.en", "none.fr"), "Cannot read none.fr"),
        (("none.en", "x.fr"), "Cannot read none.en"),
        (("x.en", "x.fr", "--format", "tsv"), "leave TARGET out"),
        (("x.en", "x.fr", "--gold"), "no gold links"),
        (("x.en", "x.fr", "--layer", "9"), "There is no layer 9: this model has layers 1 to 2"),
        (("x.en", "x.fr", "--scope", "ATTN-N"), "before the decoder reads the source"),
        (("x.en", "x.fr", "--threshold", "2"), "share of a row"),
        (("x.en", "x.fr", "-o", "none/x.links"), "the folder none does not exist"),
        (("x.en", "x.fr", "-o", "."), "it is a folder"),
        (("gold.jsonl",), "There is no column 'text'"),
    ],
)
def test_refused(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert said in result.stderr
