"""Summaries of a run's tables against the same numbers computed row by row with numpy and scipy, and their figures."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from normscope import NormscopeError, corpus
from normscope.corpus.store import Run
from normscope.corpus.table_summary import entry_means, find_outliers, means_over_entries, measure_tables, table_shape
from normscope.measures.uncertainty import mean_interval
from tests.helpers.corpus_runs import toy_lines
from tests.helpers.toys import save_model

MEASURES = ["mixing", "similarity", "category_sums", "value_norms", "vector_norms"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("labelled")
    model = save_model(folder / "model", max_position_embeddings=24)
    rows = [f"{line}\t{'' if n == 3 else 'a' if n % 3 else '<b>'}\t{n}" for n, line in enumerate(toy_lines(12))]
    (folder / "data.tsv").write_text("text\tlabel\tnumber\n" + "\n".join(rows) + "\n")
    scopes = ["attention", "attention-block", "layer"]
    options: dict[str, Any] = {"measures": MEASURES, "scopes": scopes, "reader": {"keep": ["label", "number"]}}
    corpus.run(folder / "data.tsv", model, folder / "run", **options)
    return corpus.open(folder / "run")


def naive_entry_means(run: Run, by: str | None = None) -> dict[Any, list[float]]:
    """(scope, layer, group) -> the mean mixing ratio of each entry."""
    rows: dict[Any, list[float]] = defaultdict(list)
    for row in run.table("mixing").collect().iter_rows(named=True):
        rows[row["scope"], row["layer"], row[by] if by else None, row["id"]].append(row["mixing"])
    found: dict[Any, list[float]] = defaultdict(list)
    for (scope, layer, group, _), values in rows.items():
        found[scope, layer, group].append(float(np.mean(values)))
    return found


@pytest.mark.parametrize("by", [None, "label", "category"])
def test_means_are_over_entries(run: Run, by: str | None) -> None:
    naive = naive_entry_means(run, by)
    found = means_over_entries(entry_means(run, "mixing", by=by))
    assert len(found) == len(naive)
    for row in found.iter_rows(named=True):
        values = naive[row["scope"], row["layer"], row["group"] if by else None]
        assert row["entries"] == len(values)
        assert row["mean"] == pytest.approx(np.mean(values), rel=1e-6)
        if len(values) > 4:  # the quantile is an approximation for few entries
            low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
            assert [row["low"], row["high"]] == pytest.approx([low, high], rel=0.02)


def test_intervals_of_means() -> None:
    assert np.isnan(mean_interval(1.0, None, 1)).all()
    for items in (5, 30, 10_000):
        low, high = mean_interval(2.0, 3.0, items)
        assert [low, high] == pytest.approx(stats.t.interval(0.95, items - 1, 2.0, 3.0 / np.sqrt(items)), abs=0.02)


def test_outliers(run: Run) -> None:
    rows: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in run.scan("mixing").collect().iter_rows(named=True):
        rows[row["scope"], row["layer"]][row["id"]].append(row["mixing"])
    worst: dict[str, float] = {}
    for entries in rows.values():
        means = {id: float(np.mean(values)) for id, values in entries.items()}
        median = np.median(list(means.values()))
        spread = 1.4826 * np.median([abs(value - median) for value in means.values()])
        for id, value in means.items():
            worst[id] = max(worst.get(id, 0.0), abs(value - median) / spread)
    found = find_outliers(entry_means(run, "mixing"), 4)
    assert [one.id for one in found] == sorted(worst, key=lambda id: -worst[id])[:4]
    assert [one.distance for one in found] == pytest.approx([worst[one.id] for one in found], rel=1e-5)


def test_shapes_of_the_tables_of_built_in_measures(run: Run) -> None:
    assert set(measure_tables(run)) == set(MEASURES)
    shapes = {name: table_shape(run, name) for name in MEASURES}
    assert shapes["mixing"].values == ("mixing", "remainder")
    assert shapes["category_sums"].keys == ("scope", "category")
    assert shapes["value_norms"].keys == ("head",)


@pytest.mark.parametrize("name", MEASURES)
def test_every_built_in_measure_has_a_figure(run: Run, name: str) -> None:
    axes = run.plot(name)
    assert axes.figure.axes
    assert run.plot(name, value=table_shape(run, name).values[-1], scope="layer" if name == "mixing" else None).figure


def test_a_figure_shows_the_means_of_the_groups(run: Run) -> None:
    axes: Any = run.plot("mixing", by="label", scope="layer")
    naive = naive_entry_means(run, "label")
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert set(lines) == {"a", "<b>", "∅"}
    scope = run.resolve_scope("layer")
    for label, values in lines.items():
        group = "" if label == "∅" else label
        assert values == pytest.approx([np.mean(naive[scope, layer, group]) for layer in range(len(values))], rel=1e-6)


def test_a_line_has_one_colour_in_all_panels(run: Run) -> None:
    grid: Any = run.plot("similarity")
    colours: dict[str, set[str]] = defaultdict(set)
    for axes in grid.flat:
        for line in axes.get_lines():
            colours[line.get_label()].add(line.get_color())
    assert len(colours) > 1
    assert all(len(some) == 1 for some in colours.values())


def test_a_table_without_layers_is_a_distribution(run: Run, tmp_path: Path) -> None:
    from normscope.corpus import measure_registry

    known = dict(measure_registry._measures)
    try:
        measure_registry.register_measure("lengths", scopes=["layer"])(lambda analysis: {"count": [len(analysis.rows)]})
        data, model = run.manifest["data"]["path"], run.manifest["model"]["name"]
        corpus.run(data, model, tmp_path / "run", measures=["lengths"])
    finally:
        measure_registry._measures.clear()
        measure_registry._measures.update(known)
    axes: Any = corpus.open(tmp_path / "run").plot("lengths")
    assert axes.get_ylabel() == "share of entries"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mixings", {}, "no table 'mixings'.*mixing"),
        ("mixing", {"by": "labels"}, "no column 'labels'.*label"),
        ("mixing", {"value": "mix"}, "no numbers 'mix'"),
        ("mixing", {"by": "number"}, "12 different values"),
        ("mixing", {"scope": "weights"}, "no scope 'weights'"),
        ("value_norms", {"scope": "layer"}, "no scopes to choose from"),
    ],
)
def test_figures_that_cannot_be_drawn(run: Run, name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(NormscopeError, match=said):
        run.plot(name, **options)
