"""The report of a corpus run: the distributions of its measures, and its outliers with links to their maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from normscope.corpus.entry_pages import analyse_entries
from normscope.corpus.shard_tables import import_polars
from normscope.corpus.store import Run
from normscope.corpus.table_summary import (
    Outlier,
    entry_means,
    find_outliers,
    means_over_entries,
    measure_tables,
    table_shape,
)
from normscope.errors import NormscopeError
from normscope.labels import shorten_label
from normscope.models.source import ModelSource
from normscope.reports import charts
from normscope.reports.report import Picture, Report, ReportLink, Section, Table
from normscope.reports.write import write_report
from normscope.view.figure.maps import figure_of
from normscope.view.html import write_page

FOLDER = "report"  # in the folder of the run
MAPS = "maps"  # the folder of the pages, in that of the report
TEXT = 70  # characters of an entry
FAULTS = 20  # shown in the report
GROUPS = 8  # values of a kept column at most, to be compared


def write_corpus_report(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    model: str | Path | ModelSource | None = None,
    outliers: int = 5,
    command: str = "",
) -> Path:
    """Write the report of a run, finished or not: report.html with figures and tables of every measure, the entries
    that could not be analysed, and the entries farthest from the others, each with a link to its maps.

    The maps are pages of the viewer, computed again from the run's data with its model. If these are not there, the
    report says why and has no links.

    Args:
        folder: The folder of the run.
        out: The folder of the report (default: `report` in that of the run).
        model: The run's model, if it is no longer where it was.
        outliers: The number of outliers of each measure.
        command: The command that wrote it, for the page.

    Returns:
        The path of report.html.

    Raises:
        NormscopeError: If the folder does not contain a run, one of its files is damaged, or nothing is done yet.
    """
    run = Run(folder)
    if "items" not in run.tables and "errors" not in run.tables:
        raise NormscopeError(f"Nothing of the run in {run.folder} is done yet. Resume it first.")
    target = Path(out) if out is not None else run.folder / FOLDER
    names = measure_tables(run)
    found = {name: _outliers_of_table(run, name, outliers) for name in names}
    ids = list(dict.fromkeys(one.id for some in found.values() for one in some))
    pages, problem = _write_map_pages(run, ids, target / MAPS, model)
    sections = [
        *([_outlier_section(run, found, pages, problem)] if ids else []),
        *(_measure_section(run, name, place) for place, name in enumerate(names, 1)),
        *_fault_sections(run),
    ]
    report = Report(
        "corpus run",
        f"{Path(_model_name(run)).name} on {_data_name(run)}",
        _progress(run),
        _facts(run),
        (),
        tuple(sections),
        (),
        command,
    )
    return write_report(report, target)


def _outliers_of_table(run: Run, name: str, count: int) -> list[Outlier]:
    return find_outliers(entry_means(run, name), count)


def _write_map_pages(
    run: Run, ids: Sequence[str], folder: Path, model: str | Path | ModelSource | None
) -> tuple[dict[str, str], str]:
    """The name of the page of each entry, and why some have none."""
    pages: dict[str, str] = {}
    if not ids:
        return pages, ""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for number, (id, result) in enumerate(analyse_entries(run, ids, model), 1):
            name = f"{number:03d}.html"
            write_page(result, folder / name)
            pages[id] = name
    except NormscopeError as error:
        return pages, " ".join(str(error).split())
    return pages, ""


def _outlier_section(run: Run, found: dict[str, list[Outlier]], pages: dict[str, str], problem: str) -> Section:
    texts = _texts_of_entries(run, {one.id for some in found.values() for one in some})
    columns = {"entry": "", "measure": "", "distance": ".1f", "where": "", "layer": "", "value": ".4g", "median": ".4g"}
    rows: list[tuple[Any, ...]] = []
    for name, some in found.items():
        for one in some:
            shown = ReportLink(one.id, MAPS, pages[one.id]) if one.id in pages else one.id
            layer = None if one.layer is None else one.layer + 1
            place = (" ".join(one.place), layer, one.value, one.median)
            rows.append((shown, name, one.distance, *place, texts.get((one.id, one.side), "")))
    note = (
        "The mean of an entry is compared with the median over entries in the same place; the distance is "
        "|value - median| / (1.4826 MAD), with the median absolute deviation MAD, which a normal distribution has in "
        "standard deviations. An entry is listed where it is farthest. Layers count from 1."
    )
    table = Table.of("outliers", "The entries farthest from the others", columns | {"text": ""}, rows, note)
    text = "Each entry links to its maps." if not problem else f"Entries without a link have no maps: {problem}"
    return Section("outliers", "Outliers", text, (table,))


def _texts_of_entries(run: Run, ids: set[str]) -> dict[tuple[str, str], str]:
    polars = import_polars()
    rows = run.scan("items").filter(polars.col("id").is_in(list(ids))).select("id", "side", "tokens").collect()
    return {(id, side): shorten_label(" ".join(tokens), TEXT) for id, side, tokens in rows.iter_rows()}


def _measure_section(run: Run, name: str, place: int) -> Section:
    """The figures and the table of means of a measure."""
    shape = table_shape(run, name)
    parts: list[Table | Picture] = []
    missing = []
    for number, value in enumerate(shape.values, 1):
        stem = f"measure{place}-{number}"
        title = f"{name}: {value}"
        drawn: list[tuple[str | None, str, str]] = [(None, stem, f"{title}, means over entries with 95 % intervals")]
        drawn += [(by, f"{stem}-by{n}", f"{title} by {by}") for n, by in enumerate(_kept_groups(run), 1)]
        for by, part, described in drawn:
            try:
                parts.append(Picture(part, described, figure_of(run.plot(name, by=by, value=value))))
            except NormscopeError as error:  # too many panels or groups
                missing.append(f"{described}: {error}")
        parts += _distribution(run, name, value, f"{stem}-entries")
    means = means_over_entries(entry_means(run, name))
    rows = [
        [cell + 1 if column == "layer" else cell for column, cell in row.items()] for row in means.iter_rows(named=True)
    ]
    formats = {column: ".4g" if column in ("mean", "low", "high") else "" for column in means.columns}
    title = f"{name}: mean of {shape.values[0]} over entries, with the ends of its 95 % interval"
    parts.append(Table.of(f"measure{place}-means", title, formats, rows, "Layers count from 1.", folded=True))
    return Section(f"measure-{place}", name, "\n\n".join(missing), tuple(parts))


def _distribution(run: Run, name: str, value: str, stem: str) -> Iterator[Picture]:
    """How the means of the entries over their layers are distributed, by the table's last key; of several scopes, in
    the last."""
    polars = import_polars()
    shape = table_shape(run, name)
    known = entry_means(run, name, value).filter(polars.col("value").is_not_null()).collect()
    keys = [key for key in shape.keys if known[key].n_unique() > 1]
    where = ""
    for key in keys[:-1]:
        last = known[key].unique(maintain_order=True)[-1]
        known, where = known.filter(polars.col(key) == last), f"{where}, {key} {last}"
    lines = keys[-1:]
    means = known.group_by("id", "side", *lines, maintain_order=True).agg(polars.col("value").mean())
    names = means[lines[0]].unique(maintain_order=True).to_list() if lines else [""]
    if not len(means) or len(names) > GROUPS:
        return
    groups = {str(one): (means.filter(polars.col(lines[0]) == one) if lines else means)["value"] for one in names}
    figure = charts.histogram_chart(groups, xlabel=value, ylabel="share of entries")
    yield Picture(stem, f"{name}: {value}, means of entries over their layers{where}", figure)


def _kept_groups(run: Run) -> list[str]:
    """The kept columns of the data with few enough values to be compared."""
    kept = run.manifest["data"]["options"].get("keep") or ()
    if "items" not in run.tables:
        return []
    polars = import_polars()
    items = run.scan("items")
    return [one for one in kept if 1 < items.select(polars.col(one).n_unique()).collect().item() <= GROUPS]


def _fault_sections(run: Run) -> Iterator[Section]:
    if "errors" not in run.tables:
        return
    frame = run.scan("errors").select("id", "where", "reason").collect()
    note = "" if len(frame) <= FAULTS else f"The first {FAULTS}; all of them are in the table errors of the run."
    columns = dict.fromkeys(frame.columns, "")
    text = f"{len(frame)} of {sum(run.shard_entries())} entries."
    table = Table.of("faults", "Entries that could not be analysed", columns, frame.head(FAULTS).rows(), note)
    yield Section("faults", "Entries that could not be analysed", text, (table,))


def _progress(run: Run) -> str:
    done, total = sum(run.shard_entries()), run.manifest["data"]["entries"]
    return f"{done:,} of {total:,} entries are done."


def _model_name(run: Run) -> str:
    return str(run.manifest["model"]["name"] or run.manifest["model"]["family"])


def _data_name(run: Run) -> str:
    path = run.manifest["data"]["path"]
    return ", ".join(Path(one).name for one in ([path] if isinstance(path, str) else path))


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    """What was run, for the page."""
    polars = import_polars()
    model, data = run.manifest["model"], run.manifest["data"]
    facts = {"model": _model_name(run), "family": model["family"], "data": _data_name(run), "entries": _progress(run)}
    if "items" in run.tables:
        worst = run.scan("items").select(polars.col("completeness").max()).collect().item()
        facts["largest completeness error"] = "none" if worst is None else f"{worst:.1e}"
    facts["data, fingerprint"] = data["fingerprint"][:16]
    facts["model, fingerprint"] = model["fingerprint"][:16]
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in run.manifest["versions"].items())
    return tuple(facts.items())
