"""`normscope faithfulness`: methods compared from the command line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normscope.cli.runs import Address, Engine, Format, Limit, Reader, Threads, Where, Workers, reader_options
from normscope.cli.shared import bars, model_path, quiet

if TYPE_CHECKING:
    from normscope.reports.report import Report


class Target(StrEnum):
    """What is explained."""

    top = "top"
    given = "given"


class Erasure(StrEnum):
    """How tokens are taken away."""

    mask = "mask"
    delete = "delete"


def faithfulness(
    data: Annotated[
        str,
        typer.Option(
            "--data", metavar="DATA", help="A file, or the name of a Hugging Face dataset.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the report.", show_default=False)],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="M",
            help="A classifier or a language model: hub name or folder.",
            show_default=False,
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method", metavar="NAME", help="This method only, such as decompx or rollout:layer; repeatable."
        ),
    ] = None,
    target: Annotated[
        Target, typer.Option("--target", help="What the model predicts itself, or the label or token that is given.")
    ] = Target.top,
    positions: Annotated[
        int,
        typer.Option(
            "--positions", metavar="N", min=0, help="Positions of each text, of a language model; 0: the last one."
        ),
    ] = 0,
    by: Annotated[
        list[Erasure] | None, typer.Option("--by", help="How tokens are taken away; default: both.", show_default=False)
    ] = None,
    replacement: Annotated[
        str | None,
        typer.Option(
            "--replacement", metavar="TOKEN", help="What takes a token's place; default: [MASK], <unk> or alike."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of positions and random scores.")] = 0,
    format: Format = None,
    reader: Reader = None,
    limit: Limit = None,
    engine: Where = Engine.local,
    workers: Workers = 2,
    threads: Threads = 1,
    address: Address = None,
) -> None:
    """Compare every attribution method by what predictions lose without the tokens it names. The same command resumes.

    Example: normscope faithfulness --model ./classifier --data sst2.tsv --reader label=label -o report
    """
    from normscope.papers.faithfulness.comparison import compare
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
            report, path = compare(
                model_path(model),
                data,
                out,
                settings=settings,
                format=format,
                reader=reader_options(reader or []),
                limit=limit,
                engine=engine.value,
                workers=workers,
                threads=threads,
                address=address,
                progress=progress,
            )
    except StoppedError as stopped:
        typer.echo(f"{stopped} The same command goes on from here.", err=True)
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
