"""`normscope paper`: a paper's experiments from the command line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normscope.cli import loading, options
from normscope.cli.progress import bars, quiet
from normscope.corpus.readers import formats
from normscope.engine.files import check_file, check_output_folder
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope.reports.report import Check, Report


class Name(StrEnum):
    """The papers, and two studies of our own."""

    emnlp2020 = "emnlp2020"
    emnlp2021 = "emnlp2021"
    ff = "ff"
    layers = "layers"
    shapley = "shapley"


def paper(
    name: Annotated[
        Name,
        typer.Argument(
            metavar="NAME",
            help="emnlp2020, emnlp2021 or ff; or one of our own studies: layers (flow across layers), shapley (Shapley "
            "values against integrated gradients).",
            show_default=False,
            show_choices=False,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help=f"{options.DATA_HELP} Some experiments need none.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the report.")] = None,
    format: options.Format = None,
    reader: options.Reader = None,
    reading: Annotated[
        list[str] | None,
        typer.Option(
            "--reading", metavar="KEY=VALUE", help="Choice that the paper leaves open; see --list. Repeatable."
        ),
    ] = None,
    experiment: Annotated[
        list[str] | None,
        typer.Option("--experiment", metavar="NAME", help="Run only this experiment; see --list. Repeatable."),
    ] = None,
    frequencies: Annotated[
        Path | None,
        typer.Option("--frequencies", metavar="FILE", help="File of word frequencies (default: counted in the data)."),
    ] = None,
    example: Annotated[
        str | None,
        typer.Option("--example", metavar="TEXT", help="Text whose maps are drawn (default: from the data)."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the published numbers; exit code 1 if one differs.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the paper's experiments and readings.")] = False,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 16,
    engine: options.Where = options.Engine.local,
    workers: options.Workers = 2,
    threads: options.Threads = 1,
    address: options.Address = None,
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
) -> None:
    """Run a paper's experiments on a model and a corpus, and write one report. The same command resumes.

    Example: normscope paper emnlp2021 wiki.txt --format pairs -o report
    """
    if listing:
        print_list(name.value)
        return
    if out is None:
        raise NormscopeError("Say where the report goes: --out DIR.")
    given = options.reader_options(reader)
    if data is not None:
        formats.check_corpus(data, format, **given)
    if frequencies is not None:
        check_file(frequencies)
    check_output_folder(out)
    source = loading.source_of(model, device, dtype, revision)
    from normscope.papers.runs import StoppedError
    from normscope.papers.study import find_paper, reproduce

    try:
        with quiet(), bars() as progress:
            report, path = reproduce(
                find_paper(name.value),
                source,
                data,
                out,
                format=format,
                reader=given,
                readings=reading or (),
                experiments=experiment or None,
                frequencies=frequencies,
                example=example,
                limit=limit,
                engine=engine.value,
                workers=workers,
                threads=threads,
                address=address,
                batch_size=batch_size,
                verify=verify,
                progress=progress,
            )
    except StoppedError as stopped:
        typer.echo(f"{stopped} The same command resumes.", err=True)
        raise typer.Exit(130) from stopped
    print_result(report, path)
    if verify and not print_checks(report.checks):
        raise typer.Exit(1)


def print_list(name: str) -> None:
    """A paper's experiments with what they need, and its readings with their defaults."""
    from normscope.papers.readings import describe_readings
    from normscope.papers.study import find_paper

    chosen = find_paper(name)
    console = Console(highlight=False)
    console.print(Text(f"{chosen.title}\n{chosen.citation}\n"), soft_wrap=True)
    experiments = _plain_table("experiment", "", "needs")
    for entry in chosen.experiments:
        experiments.add_row(Text(entry.name), Text(entry.title), Text(entry.needs))
    console.print(experiments, "")
    readings = _plain_table("reading", "default", "meaning")
    for name, value, meaning in describe_readings(chosen.readings()):
        readings.add_row(Text(name), Text(value), Text(meaning))
    console.print(readings)


def print_result(report: Report, path: Path) -> None:
    """Where the report is, and what it came to."""
    from normscope.reports.report import tally_claims

    said = f" {tally_claims(report.claims)}" if report.claims else ""
    typer.echo(f"{path}: {len(report.sections)} experiments.{said}")
    for title, why in report.skipped:
        typer.echo(f"not run: {title}: {why}", err=True)


def print_checks(checks: tuple[Check, ...]) -> bool:
    """The published numbers beside ours; whether none is off."""
    from normscope.reports.report import count_failures, format_cell

    table = Table(title="published numbers and ours", title_justify="left")
    for column in ("number", "published", "ours", "tolerance", ""):
        table.add_column(column, justify="left" if column in ("number", "") else "right", no_wrap=True)
    styles = {True: "green", False: "bold red", None: ""}
    for check in checks:
        numbers = (format_cell(check.published), format_cell(check.ours), format_cell(check.tolerance))
        table.add_row(Text(check.key), *numbers, Text(check.verdict, style=styles[check.passed]))
    console = Console(highlight=False)
    console.print(table)
    failed, counted = count_failures(checks), sum(check.passed is not None for check in checks)
    console.print(f"{counted - failed} of {counted} within tolerance, {len(checks) - counted} more are not counted.")
    return failed == 0


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0)
    return table
