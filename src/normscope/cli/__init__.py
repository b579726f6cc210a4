"""The command line: parse, call, print. Layers are counted from 1 here, and the output says so.

torch, transformers and matplotlib are imported inside the commands: --help must not wait for them.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from normscope._version import __version__
from normscope.cli import analyze, check, corpus, demo, faithfulness, models, paper, serve
from normscope.errors import NormscopeError


class Commands(TyperGroup):
    """Turns a refusal into one line and exit code 1, and Ctrl-C into exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NormscopeError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How much each input token contributes to each output vector inside a Transformer layer.",
)

for command in (
    demo.demo,
    analyze.analyze,
    check.check,
    models.models,
    corpus.corpus,
    paper.paper,
    faithfulness.faithfulness,
    serve.serve,
):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normscope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """The `normscope` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # tokens may hold what the terminal cannot encode
    try:
        app(prog_name="normscope")
    except KeyboardInterrupt:
        sys.exit(130)
