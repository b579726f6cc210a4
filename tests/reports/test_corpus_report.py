"""The report of a corpus run: what it shows, its links, and that nothing of the data becomes markup."""

from __future__ import annotations

import html
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest
from typer.testing import CliRunner

from normscope import Analyzer, NormscopeError, corpus
from normscope.cli import app
from normscope.corpus.entry_pages import analyse_entries
from normscope.reports.corpus_report import write_corpus_report
from tests.helpers.corpus_runs import toy_lines
from tests.helpers.toys import save_model

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data and a run with an entry that fails."""
    root = tmp_path_factory.mktemp("reported")
    save_model(root / "model", max_position_embeddings=24)
    rows = [f"{line}\t{EVIL if n % 2 else 'plain'}" for n, line in enumerate(toy_lines(10))]
    (root / "data.tsv").write_text("\n".join(["text\tlabel", *rows, f"{'a ' * 40}\tplain"]) + "\n")
    options: dict[str, Any] = {"scopes": ["attention", "layer"], "reader": {"keep": ["label"]}}
    corpus.run(root / "data.tsv", root / "model", root / "run", measures=["mixing", "similarity"], **options)
    return root


class _Tags(HTMLParser):
    """The names of the tags of a page, and the targets of its links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("href", "src") and value]


def test_a_report_has_distributions_outliers_and_their_maps(folder: Path, tmp_path: Path) -> None:
    path = write_corpus_report(folder / "run", tmp_path / "report", outliers=2)
    text = path.read_text()
    page = _Tags(text)
    pages = [link for link in page.links if link.startswith("maps/")]
    assert pages
    for link in set(pages):
        shown = (path.parent / link).read_text()
        assert "normscope" in shown
    assert "script" not in page.tags  # self-contained, and no markup from the data
    assert all(link.startswith(("#", "maps/")) for link in page.links)
    assert EVIL not in text
    assert html.escape(EVIL) in text
    assert "1 of 11 entries." in text
    assert "means over entries with 95 % intervals" in text
    assert (path.parent / "tables" / "outliers.csv").read_text().count("\n") >= 3
    assert re.search(r"data\.tsv:12", text)  # the fault


def test_pages_show_what_the_run_measured(folder: Path) -> None:
    run = corpus.open(folder / "run")
    ((id, result),) = cast(Any, list(analyse_entries(run, ["data.tsv:4"])))
    layer = (pl.col("id") == id) & (pl.col("scope") == run.resolve_scope("layer"))
    rows = run.scan("mixing").filter(layer).collect()
    whole: Any = Analyzer.from_pretrained(folder / "model").analyze(toy_lines(10)[2])
    assert [label.token for label in result.rows] * 2 == rows["token"].to_list()  # two layers
    for found in (result, whole):
        assert found.mixing_ratio("layer").flatten().tolist() == pytest.approx(rows["mixing"].to_list(), rel=1e-5)


def test_another_model_or_other_data_give_no_maps(folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", max_position_embeddings=24, layer_norm_eps=1e-3)
    run = corpus.open(folder / "run")
    with pytest.raises(NormscopeError, match="is not that of the run"):
        list(analyse_entries(run, ["data.tsv:4"], other))
    copied = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    kept = (folder / "data.tsv").read_text()
    try:
        (folder / "data.tsv").write_text(kept.replace("\t", " cat\t").replace("text cat\t", "text\t"))
        path = write_corpus_report(copied, tmp_path / "report")
    finally:
        (folder / "data.tsv").write_text(kept)
    assert "The data differ from those of the run" in path.read_text()
    assert "maps/" not in path.read_text()


def test_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["corpus", "report", str(folder / "run"), "-o", str(tmp_path / "page")])
    assert done.exit_code == 0, done.output
    assert done.output.strip().endswith("report.html")
    done = CliRunner().invoke(app, ["corpus", "verify", str(folder / "run")])
    assert done.exit_code == 0
    assert CliRunner().invoke(app, ["corpus", "report"]).exit_code == 1
    assert "does not contain a corpus run" in CliRunner().invoke(app, ["corpus", "report", str(tmp_path)]).output
