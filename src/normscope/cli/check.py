"""`normscope check`: check that a model decomposes exactly."""

from __future__ import annotations

from functools import partial
from math import isinf, isnan
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normscope.cli import completion, loading, options
from normscope.cli.progress import progress_bars, silence_library_progress


def check_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=options.MODEL_HELP,
            show_default=False,
            autocompletion=completion.complete_model,
        ),
    ],
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Check that a model decomposes exactly: every scope and layer, padded and not. Exit code 1 if it does not.

    Checks both sides of an encoder-decoder; vision and speech models get random input.

    Example: normscope check bert-base-uncased --dtype float64
    """
    source = loading.find_model_source(model, device, dtype, revision, derive)
    with silence_library_progress():
        lens = loading.load_analyzer(source)
        from normscope import checking
        from normscope.tracing.proof import CLOSE

        with progress_bars() as show:
            report = checking.check(lens, progress=None if show is None else partial(show, "inputs"))
    table = Table(
        title=Text(f"{lens.model_name}: worst errors over {report.inputs} inputs (limit)"), title_justify="left"
    )
    table.add_column("scope", no_wrap=True)
    first = report.rows[0]  # all rows have the same limits
    for title, limit in (
        ("map against\nvectors", first.maps_limit),
        ("sum against\nmodel", first.sums_limit),
        ("padded\nagainst not", first.padded_limit),
    ):
        table.add_column(f"{title}\n({limit:.0e})", justify="right", no_wrap=True)
    table.add_column("")
    for row in report.rows:
        name = f"{row.side} {row.scope}" if row.side else row.scope
        table.add_row(name, *(f"{error:.1e}" for error in (row.maps, row.sums, row.padded)), _pass_or_fail(row.ok))
    console = Console(highlight=False)
    console.print(table)
    passes = Table(title="traced pass against the model alone, every layer and the head", title_justify="left")
    passes.add_column("input", no_wrap=True)
    passes.add_column(f"difference\n({CLOSE:.0e})", justify="right", no_wrap=True)
    passes.add_column("")
    for kind, error in report.passes.items():
        if isnan(error):
            passes.add_row(kind, "the model alone is not finite", "")
        else:
            passes.add_row(kind, "refused" if isinf(error) else f"{error:.1e}", _pass_or_fail(error <= CLOSE))
    console.print(passes)
    for kind, reason in report.refusals.items():
        console.print(Text(f"{kind}: {reason}"))
    console.print(_pass_or_fail(report.ok))
    if not report.ok:
        raise typer.Exit(1)


def _pass_or_fail(ok: bool) -> Text:
    return Text("PASS", style="green") if ok else Text("FAIL", style="bold red")
