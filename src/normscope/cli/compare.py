"""`normscope compare`: two or more models on the same inputs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from normscope.cli import loading, options
from normscope.cli.corpus import FAULTY, KeepOption, check_corpus_options
from normscope.cli.progress import progress_bars, silence_library_progress
from normscope.errors import NormscopeError
from normscope.files import check_output_folder

NamesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL MODEL... DATA",
        help=f"Two or more models by hub name or folder ('{options.DEFAULT}' is the default model), then the data.",
        show_default=False,
    ),
]
OutOption = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the report and the tables.")]


def compare_command(
    names: NamesArgument,
    out: OutOption,
    scope: options.Scopes = None,
    format: options.Format = None,
    reader: options.Reader = None,
    keep: KeepOption = None,
    truncate: options.Truncate = False,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 16,
    device: options.Device = None,
    dtype: options.Dtype = None,
    engine: options.EngineOption = options.Engine.local,
    workers: options.Workers = 2,
    threads: options.Threads = 1,
    address: options.Address = None,
) -> None:
    """Compare models on the same inputs: base and fine-tuned, two sizes, or the checkpoints of a training in order.

    Writes a report on the similarity of their maps, their mixing, sinks and feed-forwards, and the tokens and pairs
    that changed most, with intervals over entries. Running the same command again resumes.

    Example: normscope compare bert-base-uncased my-tuned-bert reviews.txt -o compared
    """
    if len(names) < 3:
        raise NormscopeError("Give at least two models and the data: normscope compare MODEL MODEL DATA --out DIR.")
    *models, data = names
    check_output_folder(out)
    sources = [loading.find_model_source(model, device, dtype) for model in models]
    choices: dict[str, Any] = {
        "scopes": scope or None,
        "format": format,
        "reader": check_corpus_options(data, format, reader, keep, out / "run"),
        **{"truncation": truncate, "limit": limit, "batch_size": batch_size},
        **options.cli_options_for_engine(engine, workers, threads, address),
        "command": " ".join(["normscope compare", *names, "-o", str(out)]),
    }
    with silence_library_progress(), progress_bars() as show:
        from normscope.reports.compare_models import compare

        found = compare(sources, data, out, progress=None if show is None else partial(show, "entries"), **choices)
    typer.echo(str(found.summary))
    if not found.summary.finished:
        typer.echo("stopped; run the same command again to resume", err=True)
        raise typer.Exit(130)
    if found.report is None:
        raise NormscopeError("No entry could be compared.")
    typer.echo(f"wrote {found.report}")
    if found.summary.faults:
        raise typer.Exit(FAULTY)
