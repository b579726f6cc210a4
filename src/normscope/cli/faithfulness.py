"""`normscope faithfulness`: compare attribution methods."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normscope.cli import completion, loading, options
from normscope.cli.progress import exit_when_stopped, progress_bars, silence_library_progress
from normscope.corpus.readers import formats
from normscope.files import check_output_folder

if TYPE_CHECKING:
    from normscope.reports.report import Report


class Target(StrEnum):
    """The prediction that is explained."""

    top = "top"
    given = "given"


class Erasure(StrEnum):
    """How tokens are removed."""

    mask = "mask"
    delete = "delete"


DataArgument = Annotated[str, typer.Argument(metavar="DATA", help=options.DATA_HELP, show_default=False)]
OutOption = Annotated[
    Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the report.", show_default=False)
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Hub name or folder of a classifier or a language model.",
        show_default=False,
    ),
]
MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="Compare only this method, such as decompx or rollout:layer. Repeatable.",
        autocompletion=completion.complete_method,
    ),
]
TargetOption = Annotated[
    Target, typer.Option("--target", help="Explain the model's prediction, or the given label or token.")
]
PositionsOption = Annotated[
    int,
    typer.Option(
        "--positions",
        metavar="N",
        min=0,
        help="Random positions per text to explain, for language models; 0 explains the last.",
    ),
]
ByOption = Annotated[
    list[Erasure] | None,
    typer.Option("--by", help="How tokens are removed (default: both). Repeatable.", show_default=False),
]
ReplacementOption = Annotated[
    str | None,
    typer.Option(
        "--replacement", metavar="TOKEN", help="Token that masks another (default: [MASK], <unk> or the like)."
    ),
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", metavar="SEED", help="Random seed for sampled positions and the random baseline."),
]


def faithfulness_command(
    data: DataArgument,
    out: OutOption,
    model: ModelOption,
    method: MethodOption = None,
    target: TargetOption = Target.top,
    positions: PositionsOption = 0,
    by: ByOption = None,
    replacement: ReplacementOption = None,
    seed: SeedOption = 0,
    format: options.Format = None,
    reader: options.Reader = None,
    limit: options.Limit = None,
    engine: options.EngineOption = options.Engine.local,
    workers: options.Workers = 2,
    threads: options.Threads = 1,
    address: options.Address = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Compare attribution methods by how much predictions change when their top tokens are removed.

    Running the same command again resumes.

    Example: normscope faithfulness sst2.tsv --reader label=label --model ./classifier -o report
    """
    given = options.parse_cli_reader_options(reader)
    formats.check_corpus_format(data, format, **given)
    check_output_folder(out)
    source = loading.find_model_source(model, device, dtype, revision, derive)
    from normscope.papers.faithfulness.comparison import compare_methods
    from normscope.papers.faithfulness.settings import ERASURES, Settings

    settings = Settings(
        methods=tuple(dict.fromkeys(method or ())),
        target=target.value,
        positions=positions,
        erasures=tuple(dict.fromkeys(one.value for one in by)) if by else ERASURES,
        replacement=replacement or "",
        seed=seed,
    )
    with exit_when_stopped(), silence_library_progress(), progress_bars() as progress:
        report, path = compare_methods(
            source,
            data,
            out,
            settings=settings,
            format=format,
            reader=given,
            limit=limit,
            **options.cli_options_for_engine(engine, workers, threads, address),
            progress=progress,
        )
    print_faithfulness_result(report, path, settings.erasures)


def print_faithfulness_result(report: Report, path: Path, erasures: tuple[str, ...]) -> None:
    """Print comprehensiveness and sufficiency of every method, and the path of the report."""
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
