"""Options of readers and of runs: parsed, checked, single and repeated."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from normscope import Analyzer, NormscopeError, cli, corpus
from normscope.cli.options import parse_cli_reader_options
from normscope.corpus import read
from tests.helpers.files import good, write
from tests.helpers.tiny import tiny
from tests.helpers.toys import toy_tokenizer


@cache
def lens() -> Analyzer:
    return Analyzer(tiny("bert", dtype=torch.float32), toy_tokenizer())


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("text=--5", "--5"),
        ("text=²", "²"),
        ("text=-", "-"),
        ("text=", ""),
        ("word_column=-5", -5),
        ("overlap=True", True),
        ("tag_column=none", None),
        ("tag_column=None", None),
        ("pair=premise,5", ("premise", "5")),
        ("pair=none", None),
        ("header=true,1", ("true", "1")),
    ],
)
def test_reader_options_as_typed(typed: str, value: Any) -> None:
    found = parse_cli_reader_options([typed])[typed.partition("=")[0]]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("format", "option", "value", "wanted"),
    [
        ("conll", "word_column", "abc", "an integer"),
        ("conll", "word_column", None, "an integer"),
        ("conll", "word_column", True, "an integer"),
        ("conll", "tag_column", 1.5, "an integer or none"),
        ("conll", "scheme", 5, "a string or none"),
        ("conllu", "syntactic", 1, "true or false"),
        ("pairs", "max_tokens", "many", "an integer"),
        ("csv", "delimiter", 5, "a string"),
        ("csv", "header", "ab", "a list of names or none"),
        ("csv", "header", [1, 2], "a list of names or none"),
        ("tsv", "text", 5, "a string or none"),
        ("jsonl", "pair", "ab", "a list of names or none"),
        ("alignments", "base", "x", "an integer"),
        ("alignments", "source", 5, "a string or a path or none"),
    ],
)
def test_reader_options_of_another_type(tmp_path: Path, format: str, option: str, value: Any, wanted: str) -> None:
    path = write(tmp_path, "a b\n", "x.txt")
    with pytest.raises(NormscopeError) as caught:
        read(path, format, **{option: value})
    assert str(caught.value) == f"The option {option} of the format {format!r} takes {wanted}, not {value!r}."


def test_reader_options_that_fit(tmp_path: Path) -> None:
    assert good(next(read(write(tmp_path, "a B\n", "x.conll"), tag_column=None))).words == ("a",)
    table = write(tmp_path, "a\tb\n", "x.tsv")
    for several in (["p", "q"], ("p", "q")):
        assert good(next(read(table, header=several, pair=several, text=None))).pair == ("a", "b")


def test_a_pair_of_columns_from_the_command_line(tmp_path: Path) -> None:
    lens().model.save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    table = write(tmp_path, "p\tq\na cat\tthe dog\n", "x.tsv")
    arguments = ["corpus", str(table), "-m", str(tmp_path / "model"), "-o", str(tmp_path / "run")]
    for said in ("1 of 1 entries done", "were done before"):
        result = CliRunner().invoke(cli.app, [*arguments, "--reader", "pair=p,q"])
        assert said in result.output
    wrong = CliRunner().invoke(cli.app, [*arguments, "--reader", "quoting=2"])
    assert wrong.stderr == "error: The option quoting of the format 'tsv' takes true or false, not 2.\n"
    layer = CliRunner().invoke(cli.app, [*arguments, "--layer", "99"])
    assert layer.stderr == "error: There is no layer 99: this model has layers 1 to 2.\n"


def test_single_values_equal_lists_of_one(tmp_path: Path) -> None:
    data = write(tmp_path, "a cat\n")
    one: dict[str, Any] = {"measures": "mixing", "maps": "layer", "scopes": "weights", "layers": 1}
    several = {name: [value] for name, value in one.items()}
    for name, options in (("one", one), ("several", several), ("one", several)):
        corpus.run(data, lens(), tmp_path / name, **options)
    options = json.loads((tmp_path / "one/manifest.json").read_bytes())["options"]
    assert {name: options[name] for name in several} == several
    assert corpus.open(tmp_path / "one").scan("mixing").collect()["layer"].unique().to_list() == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"measures": 5},
        {"measures": [["mixing"]]},
        {"maps": [1]},
        {"scopes": 5},
        {"layers": "1"},
        {"layers": 1.5},
        {"layers": []},
        {"threads": 0},
        {"threads": "2"},
    ],
    ids=repr,
)
def test_bad_options_of_a_run(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(NormscopeError, match=name.removesuffix("s")):
        corpus.run(write(tmp_path, "a cat\n"), lens(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
