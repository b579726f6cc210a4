"""`normscope faithfulness`: attribution methods compared."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normscope.cli import completion, loading, options
from normscope.cli.progress import bars, quiet
from normscope.corpus.readers import formats
from normscope.engine.files import check_output_folder

if TYPE_CHECKING:
    from normscope.reports.report import Report


class Target(StrEnum):
    """What is explained."""

    top = "top"
    given = "given"


class Erasure(StrEnum):
    """How tokens are removed."""

    mask = "mask"
    delete = "delete"


def faithfulness(
    data: Annotated[str, typer.Argument(metavar="DATA", help=options.DATA_HELP, show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the report.", show_default=False)],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Hub name or folder of a classifier or a language model.",
            show_default=False,
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Compare only this method, such as decompx or rollout:layer. Repeatable.",
            autocompletion=completion.complete_method,
        ),
    ] = None,
    target: Annotated[
        Target, typer.Option("--target", help="Explain the model's prediction, or the given label or token.")
    ] = Target.top,
    positions: Annotated[
        int,
        typer.Option(
            "--positions",
            metavar="N",
            min=0,
            help="Random positions per text to explain, for language models; 0 explains the last.",
        ),
    ] = 0,
    by: Annotated[
        list[Erasure] | None,
        typer.Option("--by", help="How tokens are removed (default: both). Repeatable.", show_default=False),
    ] = None,
    replacement: Annotated[
        str | None,
        typer.Option(
            "--replacement", metavar="TOKEN", help="Token that masks another (default: [MASK], <unk> or the like)."
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="SEED", help="Random seed for sampled positions and the random baseline."),
    ] = 0,
    format: options.Format = None,
    reader: options.Reader = None,
    limit: options.Limit = None,
    engine: options.Where = options.Engine.local,
    workers: options.Workers = 2,
    threads: options.Threads = 1,
    address: options.Address = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
) -> None:
    """Compare attribution methods by what predictions lose without the tokens they name. The same command resumes.

    Example: normscope faithfulness sst2.tsv --reader label=label --model ./classifier -o report
    """
    given = options.reader_options(reader)
    formats.check_corpus(data, format, **given)
    check_output_folder(out)
    source = loading.source_of(model, device, dtype, revision)
    from normscope.papers.faithfulness.comparison import compare_methods
    from normscope.papers.faithfulness.settings import ERASURES, Settings
    from normscope.papers.runs import StoppedError

    settings = Settings(
        methods=tuple(dict.fromkeys(method or ())),
        target=target.value,
        positions=positions,
        erasures=tuple(dict.fromkeys(one.value for one in by)) if by else ERASURES,
        replacement=replacement or "",
        seed=seed,
    )
    try:
        with quiet(), bars() as progress:
            report, path = compare_methods(
                source,
                data,
                out,
                settings=settings,
                format=format,
                reader=given,
                limit=limit,
                engine=engine.value,
                workers=workers,
                threads=threads,
                address=address,
                progress=progress,
            )
    except StoppedError as stopped:
        typer.echo(f"{stopped} The same command resumes.", err=True)
        raise typer.Exit(130) from stopped
    print_result(report, path, settings.erasures)


def print_result(report: Report, path: Path, erasures: tuple[str, ...]) -> None:
    """Comprehensiveness and sufficiency of every method, and where the report is."""
    numbers = report.numbers
    table = Table(title="AOPC: comprehensiveness (higher is better) and sufficiency (lower)", title_justify="left")
    table.add_column("method", no_wrap=True)
    for erasure in erasures:
        for what in ("comp.", "suff."):
            table.add_column(f"{what} by {erasure}", justify="right")
    first = f"comprehensiveness.{erasures[0]}."
    for key in (key for key in numbers if key.startswith(first)):
        name = key.removeprefix(first)
        cells = [
            f"{numbers[f'{what}.{erasure}.{name}']:.3f}"
            for erasure in erasures
            for what in ("comprehensiveness", "sufficiency")
        ]
        table.add_row(Text(name), *cells)
    Console(highlight=False).print(table)
    typer.echo(f"{path}: {len(report.sections)} sections.")
    for name, why in report.skipped:
        typer.echo(f"not compared: {name}: {why}", err=True)
