"""The command line: parse, call, print. Layers are counted from 1 here, and the output says so.

torch, transformers, polars and matplotlib are imported inside the commands, after paths have been checked: neither
--help nor the refusal of a wrong path may wait for them.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from normscope._version import __version__
from normscope.cli import analyze, check, corpus, demo, faithfulness, flow, models, paper, serve
from normscope.errors import NormscopeError
from normscope.view.wording import COMMAND_LINE


def _show_flags(parameters: list[Any]) -> list[Any]:
    """Options that take no value show none in the help."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """One command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _show_flags(super().get_params(ctx))


class Commands(TyperGroup):
    """Turns a refusal into one line and exit code 1, and Ctrl-C into exit code 130."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _show_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NormscopeError as error:
            typer.echo(f"error: {COMMAND_LINE.reword(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How much each input token contributes to each output vector inside a Transformer.",
    epilog='Example: normscope analyze "Colin Fleming plays tennis."',
)

for command in (
    demo.demo,
    analyze.analyze,
    flow.flow,
    serve.serve,
    corpus.corpus,
    paper.paper,
    faithfulness.faithfulness,
    check.check,
    models.models,
):
    app.command(cls=Command)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normscope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
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
