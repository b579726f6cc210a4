"""`normscope paper`: run the experiments of a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normscope.cli import loading, options
from normscope.cli.progress import exit_when_stopped, progress_bars, silence_library_progress
from normscope.corpus.readers import formats
from normscope.errors import NormscopeError
from normscope.files import check_file, check_output_folder

if TYPE_CHECKING:
    from normscope.reports.report import Check, Report


class PaperName(StrEnum):
    """The papers, and two further studies."""

    emnlp2020 = "emnlp2020"
    emnlp2021 = "emnlp2021"
    ff = "ff"
    layers = "layers"
    shapley = "shapley"


NameArgument = Annotated[
    PaperName,
    typer.Argument(
        metavar="NAME",
        help="emnlp2020, emnlp2021 or ff; or one of two further studies: layers (flow across layers), shapley "
        "(Shapley values against integrated gradients).",
        show_default=False,
        show_choices=False,
    ),
]
DataArgument = Annotated[
    str | None,
    typer.Argument(metavar="DATA", help=f"{options.DATA_HELP} Optional for some experiments.", show_default=False),
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the report.")]
ReadingOption = Annotated[
    list[str] | None,
    typer.Option("--reading", metavar="KEY=VALUE", help="Setting that the paper leaves open; see --list. Repeatable."),
]
ExperimentOption = Annotated[
    list[str] | None,
    typer.Option("--experiment", metavar="NAME", help="Run only this experiment; see --list. Repeatable."),
]
FrequenciesOption = Annotated[
    Path | None,
    typer.Option("--frequencies", metavar="FILE", help="File of word frequencies (default: counted in the data)."),
]
ExampleOption = Annotated[
    str | None,
    typer.Option("--example", metavar="TEXT", help="Text whose maps are drawn (default: from the data)."),
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Compare with the published numbers; exit code 1 if one differs.")
]
BesideOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--beside",
        metavar="DIR",
        help="Finished report of the same paper, on another model or corpus, to compare with. Repeatable.",
    ),
]
ListingOption = Annotated[bool, typer.Option("--list", help="List the paper's experiments and readings.")]


def paper_command(
    name: NameArgument,
    data: DataArgument = None,
    out: OutOption = None,
    format: options.Format = None,
    reader: options.Reader = None,
    reading: ReadingOption = None,
    experiment: ExperimentOption = None,
    frequencies: FrequenciesOption = None,
    example: ExampleOption = None,
    verify: VerifyOption = False,
    listing: ListingOption = False,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 16,
    engine: options.EngineOption = options.Engine.local,
    workers: options.Workers = 2,
    threads: options.Threads = 1,
    address: options.Address = None,
    model: options.Models = None,
    beside: BesideOption = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Run a paper's experiments on a model and a corpus, and write a report.

    With several models, each has a full report, and another one compares them. Running the same command again resumes.

    Example: normscope paper emnlp2021 wiki.txt --format pairs -o report
    """
    if listing:
        print_experiments(name.value)
        return
    if out is None:
        raise NormscopeError("Give a folder for the report with --out DIR.")
    given = options.parse_cli_reader_options(reader)
    _check_paper_paths(data, format, given, frequencies, out)
    # Finished reports alone are compared without a model.
    names = model or ([] if beside and data is None else [options.DEFAULT])
    sources = [loading.find_model_source(one, device, dtype, revision, derive) for one in names]
    from normscope.papers.several import compare_models
    from normscope.papers.study import find_paper, reproduce

    paper = find_paper(name.value)
    with exit_when_stopped(), silence_library_progress(), progress_bars() as progress:
        settings: dict[str, Any] = {
            "format": format,
            "reader": given,
            "readings": reading or (),
            "experiments": experiment or None,
            "frequencies": frequencies,
            "example": example,
            "limit": limit,
            **options.cli_options_for_engine(engine, workers, threads, address),
            "batch_size": batch_size,
            "verify": verify,
            "progress": progress,
        }
        if len(sources) == 1 and not beside:
            report, path = reproduce(paper, sources[0], data, out, **settings)
        else:
            report, path = compare_models(paper, sources, data, out, beside=beside or (), **settings)
    print_report_path(report, path)
    if verify and not print_all_checks(report.members[: len(sources)] or (report,)):
        raise typer.Exit(1)


def _check_paper_paths(
    data: str | None, format: str | None, reader: Mapping[str, Any], frequencies: Path | None, out: Path
) -> None:
    """Raise if an input cannot be read, or the report cannot be written."""
    if data is not None:
        formats.check_corpus_format(data, format, **reader)
    if frequencies is not None:
        check_file(frequencies)
    check_output_folder(out)


def print_experiments(name: str) -> None:
    """Print a paper's experiments with their requirements, and its readings with their defaults."""
    from normscope.papers.readings import describe_readings
    from normscope.papers.study import find_paper

    chosen = find_paper(name)
    console = Console(highlight=False)
    console.print(Text(f"{chosen.title}\n{chosen.citation}\n"), soft_wrap=True)
    experiments = _experiment_table("experiment", "", "needs")
    for entry in chosen.experiments:
        experiments.add_row(Text(entry.name), Text(entry.title), Text(entry.needs))
    console.print(experiments, "")
    readings = _experiment_table("reading", "default", "meaning")
    for one in describe_readings(chosen.readings()):
        readings.add_row(Text(one.name), Text(one.value), Text(one.meaning))
    console.print(readings)


def print_report_path(report: Report, path: Path) -> None:
    """Print the path of the report, and how many claims hold in it or, for a joint report, in each member."""
    from normscope.labels import count_label
    from normscope.reports.report import tally_claims

    if report.members:
        typer.echo(f"{path}: {count_label(len(report.members), 'report')}.")
    for label, one in zip(report.labels or ("",), report.members or (report,), strict=True):
        claims = f" {tally_claims(one.claims)}" if one.claims else ""
        typer.echo(f"{label or path}: {count_label(len(one.sections), 'experiment')}.{claims}")
        for title, why in one.skipped:
            typer.echo(f"not run: {f'{label}: ' if label else ''}{title}: {why}", err=True)


def print_all_checks(reports: Sequence[Report]) -> bool:
    """Print the published numbers beside those of each report; True if all are within tolerance."""
    passed = [print_paper_checks(report.checks) for report in reports]
    return all(passed)


def print_paper_checks(checks: tuple[Check, ...]) -> bool:
    """Print the published numbers beside ours; True if all are within tolerance."""
    from normscope.reports.report import count_failures, format_cell

    table = Table(title="published numbers and ours", title_justify="left")
    for column in ("number", "published", "ours", "tolerance", ""):
        table.add_column(column, justify="left" if column in ("number", "") else "right", no_wrap=True)
    styles = {True: "green", False: "bold red", None: ""}
    for check in checks:
        numbers = (
            format_cell(check.published),
            format_cell(check.ours),
            format_cell(check.tolerance),
        )
        table.add_row(Text(check.key), *numbers, Text(check.verdict, style=styles[check.passed]))
    console = Console(highlight=False)
    console.print(table)
    failed, counted = count_failures(checks), sum(check.passed is not None for check in checks)
    console.print(f"{counted - failed} of {counted} within tolerance, {len(checks) - counted} more are not counted.")
    return failed == 0


def _experiment_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0)
    return table
