"""The report of a comparison of models: what changed, by scope and layer, with intervals over entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.corpus.comparison import QUANTITIES
from normscope.corpus.shard_tables import import_polars
from normscope.corpus.store import Run
from normscope.measures.uncertainty import Estimate, Resampled, mean_interval, resample_means
from normscope.reports.charts import line_chart
from normscope.reports.report import Picture, Report, Section, Table

RESAMPLES = 2000
MOST = 20  # tokens and pairs in the report
FEWEST = 3  # entries of a token in the report
LAYERS = "Layers count from 1 and are those of the first model."
CHANGES = (("mixing ratio", "mixing"), ("share of the first token", "sink"), ("movement by the feed-forward", "ff"))

Values = NDArray[np.float64]


@dataclass(frozen=True)
class _Compared:
    """The comparison of all entries, with bootstrap resamples: (models - 1, scopes, layers, quantities)."""

    names: tuple[str, ...]  # of the models
    scopes: tuple[str, ...]
    layers: tuple[int, ...]
    found: Resampled

    def estimates(self, model: int, scope: int, quantity: Callable[[Values], Values]) -> list[Estimate]:
        """A function of the quantities (..., quantities) at every layer."""
        chosen = [partial(_chosen_cells, quantity, model, scope, layer) for layer in range(len(self.layers))]
        return [self._estimate(function) for function in chosen]

    def mean(self, model: int, scope: int, quantity: Callable[[Values], Values]) -> Estimate:
        """The mean of it over layers."""
        return self._estimate(lambda x: quantity(x[..., model, scope, :, :]).mean(-1))

    def _estimate(self, function: Callable[[Values], Any]) -> Estimate:
        return self.found.map(function).estimate("entries")


def _chosen_cells(quantity: Callable[[Values], Values], model: int, scope: int, layer: int, cells: Values) -> Values:
    return quantity(cells[..., model, scope, layer, :])


def comparison_report(run: Run, names: Sequence[str], command: str = "") -> Report:
    """The report of a finished comparison of the models with these names."""
    compared = _read_comparison(run, _short_names(names))
    sections = [
        Section("summary", "What changed", _explanation(compared), (_summary_table(compared),)),
        Section("similarity", "Similarity of maps", "", tuple(_similarity_figures(compared))),
        *_change_sections(compared),
        *_curve_sections(compared),
        *_unit_sections(run, compared),
        *_pair_sections(run, compared),
    ]
    done, total = sum(run.shard_entries()), run.manifest["data"]["entries"]
    path = run.manifest["data"]["path"]
    data = ", ".join(Path(one).name for one in ([path] if isinstance(path, str) else path))
    facts = {f"model {n}": name for n, name in enumerate(names, 1)} | {
        "data": data,
        "entries": f"{compared.found.items:,} compared, {total - compared.found.items:,} that could not be",
        "intervals": f"95 %, bootstrap over entries, {RESAMPLES:,} resamples",
        "versions": ", ".join(f"{name} {version}" for name, version in run.manifest["versions"].items()),
    }
    title = f"{', '.join(compared.names[:-1])} and {compared.names[-1]} on {data}"
    return Report(
        "comparison of models",
        title,
        f"{done:,} of {total:,} entries",
        tuple(facts.items()),
        (),
        tuple(sections),
        (),
        command,
    )


def _short_names(names: Sequence[str]) -> tuple[str, ...]:
    """The last part of each name or, if two are equal, the last two or more."""
    parts = [name.rstrip("/").split("/") for name in names]
    for depth in range(1, max(map(len, parts)) + 1):
        found = tuple("/".join(one[-depth:]) for one in parts)
        if len(set(found)) == len(found):
            return found
    return tuple(f"{n}: {name}" for n, name in enumerate(names, 1))


def _read_comparison(run: Run, names: tuple[str, ...]) -> _Compared:
    frame = run.scan("comparison").select("id", "model", "scope", "layer", *QUANTITIES).collect()
    scopes = tuple(frame["scope"].unique(maintain_order=True).to_list())
    layers = tuple(sorted(frame["layer"].unique().to_list()))
    polars = import_polars()
    order = polars.col("scope").replace_strict(list(scopes), list(range(len(scopes))), return_dtype=polars.Int64)
    cells = frame.sort("id", "model", order, "layer").select(QUANTITIES).to_numpy()
    shape = (len(names) - 1, len(scopes), len(layers), len(QUANTITIES))
    return _Compared(names, scopes, layers, resample_means(cells.reshape(-1, *shape), RESAMPLES))


def _quantity(name: str) -> Callable[[Values], Values]:
    place = QUANTITIES.index(name)
    return lambda x: x[..., place]


def _change(name: str) -> Callable[[Values], Values]:
    """The change of a quantity from the first model to the other."""
    first, other = _quantity(f"{name}_first"), _quantity(name)
    return lambda x: other(x) - first(x)


def _explanation(compared: _Compared) -> str:
    many = "the other models" if len(compared.names) > 2 else compared.names[1]
    return (
        f"{compared.names[0]} is compared with {many} on the same inputs. The similarity is Spearman's correlation of "
        "the two maps of an entry, the distance half the sum of |difference| of the shares of a row, from 0 to 1. All "
        "are means over entries, and here over layers, with 95 % intervals over entries."
    )


def _summary_table(compared: _Compared) -> Table:
    rows: list[tuple[Any, ...]] = []
    for model, name in enumerate(compared.names[1:]):
        for place, scope in enumerate(compared.scopes):
            for title, quantity in (("similarity of maps", "similarity"), ("distance of rows", "distance")):
                one = compared.mean(model, place, _quantity(quantity))
                rows.append((name, scope, title, one.value, one.low, one.high, None, None))
            for title, quantity in CHANGES:
                one = compared.mean(model, place, _change(quantity))
                if np.isfinite(one.value):
                    both = (
                        compared.mean(model, place, _quantity(key)).value for key in (f"{quantity}_first", quantity)
                    )
                    rows.append((name, scope, f"change of {title}", one.value, one.low, one.high, *both))
    columns = {"model": "", "scope": "", "quantity": ""}
    columns |= dict.fromkeys(("value", "low", "high", "first model", "this model"), ".4f")
    return Table.of("comparison", "All quantities, averaged over layers", columns, rows, "low and high: 95 % interval.")


def _figure(
    name: str, title: str, lines: dict[str, list[Estimate]], x: Sequence[float], ylabel: str, note: str
) -> Picture:
    """Lines of estimates with their intervals."""
    series = {label: [one.value for one in some] for label, some in lines.items()}
    bands = {label: ([one.low for one in some], [one.high for one in some]) for label, some in lines.items()}
    xlabel = "layer" if note == LAYERS else "model"
    return Picture(name, title, line_chart(series, x=x, xlabel=xlabel, ylabel=ylabel, bands=bands), note)


def _layer_numbers(compared: _Compared) -> list[float]:
    return [layer + 1 for layer in compared.layers]


def _similarity_figures(compared: _Compared) -> Iterator[Picture]:
    """By scope for two models, by model for more."""
    similarity, x = _quantity("similarity"), _layer_numbers(compared)
    if len(compared.names) == 2:
        lines = {scope: compared.estimates(0, n, similarity) for n, scope in enumerate(compared.scopes)}
        title = f"Spearman's correlation of the maps of {compared.names[0]} and {compared.names[1]}"
        yield _figure("similarity", title, lines, x, "similarity", LAYERS)
        return
    for n, scope in enumerate(compared.scopes):
        lines = {name: compared.estimates(m, n, similarity) for m, name in enumerate(compared.names[1:])}
        title = f"Spearman's correlation with the maps of {compared.names[0]}, {scope}"
        yield _figure(f"similarity-{scope}", title, lines, x, "similarity", LAYERS)


def _change_sections(compared: _Compared) -> Iterator[Section]:
    """The quantities of every model by layer, wherever they are defined."""
    for title, quantity in CHANGES:
        parts = []
        for n, scope in enumerate(compared.scopes):
            lines = {compared.names[0]: compared.estimates(0, n, _quantity(f"{quantity}_first"))}
            lines |= {name: compared.estimates(m, n, _quantity(quantity)) for m, name in enumerate(compared.names[1:])}
            if any(np.isfinite(one.value) for some in lines.values() for one in some):
                described = f"{title.capitalize()}, {scope}"
                parts.append(_figure(f"{quantity}-{scope}", described, lines, _layer_numbers(compared), title, LAYERS))
        if parts:
            yield Section(quantity, title.capitalize(), "", tuple(parts))


def _curve_sections(compared: _Compared) -> Iterator[Section]:
    """For more than two models, such as checkpoints: the means over layers, model by model."""
    count = len(compared.names)
    if count < 3:
        return
    note = "Model " + ", ".join(f"{n}: {name}" for n, name in enumerate(compared.names, 1)) + ". Means over layers."
    parts = [
        _figure(
            "curve-similarity",
            f"Similarity to the maps of {compared.names[0]}",
            {
                scope: [compared.mean(m, n, _quantity("similarity")) for m in range(count - 1)]
                for n, scope in enumerate(compared.scopes)
            },
            range(2, count + 1),
            "similarity",
            note,
        )
    ]
    for title, quantity in CHANGES:
        lines = {}
        for n, scope in enumerate(compared.scopes):
            curve = [compared.mean(0, n, _quantity(f"{quantity}_first"))]
            curve += [compared.mean(m, n, _quantity(quantity)) for m in range(count - 1)]
            if any(np.isfinite(one.value) for one in curve):
                lines[scope] = curve
        if lines:
            parts.append(_figure(f"curve-{quantity}", title.capitalize(), lines, range(1, count + 1), title, note))
    yield Section("curves", "From model to model", "", tuple(parts))


def _unit_sections(run: Run, compared: _Compared) -> Iterator[Section]:
    """The tokens whose part in the rows changed most, for each model."""
    if "compared_units" not in run.tables:
        return
    polars = import_polars()
    value = polars.col("received")
    by_entry = run.scan("compared_units").group_by("model", "text", "id").agg(value.mean(), polars.col("mixing").mean())
    frame = by_entry.group_by("model", "text").agg(
        polars.len().alias("entries"), value.mean(), value.std().alias("spread"), polars.col("mixing").mean()
    )
    frame = frame.filter(polars.col("entries") >= FEWEST).sort(
        "model", value.abs(), "text", descending=[False, True, False]
    )
    rows: list[tuple[Any, ...]] = []
    for model, name in enumerate(compared.names[1:], 2):
        for row in frame.filter(polars.col("model") == model).head(MOST).collect().iter_rows(named=True):
            low, high = mean_interval(row["received"], row["spread"], row["entries"])
            rows.append((row["text"], name, row["entries"], row["received"], low, high, row["mixing"]))
    if rows:
        columns = {"token": "", "model": "", "entries": "", "change": "+.4f", "low": "+.4f", "high": "+.4f"}
        note = (
            "The change of the mean share of rows that comes from the token, at the scope of the whole layer over all "
            "layers, with its 95 % interval over entries; and the change of its own mixing ratio. Only tokens in at "
            f"least {FEWEST} entries."
        )
        table = Table.of("tokens", "Tokens", columns | {"change of mixing": "+.4f"}, rows, note)
        yield Section("tokens", "Tokens that changed most", "", (table,))


def _pair_sections(run: Run, compared: _Compared) -> Iterator[Section]:
    """The cells that changed most, for each model."""
    if "compared_pairs" not in run.tables:
        return
    polars = import_polars()
    frame = run.scan("compared_pairs").sort("model", polars.col("change").abs(), "id", descending=[False, True, False])
    rows: list[tuple[Any, ...]] = []
    for model, name in enumerate(compared.names[1:], 2):
        for row in frame.filter(polars.col("model") == model).head(MOST).collect().iter_rows(named=True):
            ends = (row["before"], row["after"], row["change"])
            rows.append((f"{row['output']} from {row['input']}", name, row["id"], row["layer"] + 1, *ends))
    if rows:
        columns = {"output from input": "", "model": "", "entry": "", "layer": ""}
        columns |= {"first model": ".4f", "this model": ".4f", "change": "+.4f"}
        note = f"Shares of rows at the scope of the whole layer. {LAYERS}"
        yield Section("pairs", "Pairs that changed most", "", (Table.of("pairs", "Pairs", columns, rows, note),))
