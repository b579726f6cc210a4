"""The command line: one module per command. Layers are counted from 1, and the output says so.

torch, transformers, polars and matplotlib are imported inside the commands, after paths have been checked, so that
--help and errors about paths do not wait for them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from normscope._version import __version__
from normscope.cli import (
    align,
    analyze,
    check,
    compare,
    corpus,
    demo,
    derive,
    explain,
    faithfulness,
    flow,
    models,
    paper,
    serve,
)
from normscope.errors import NormscopeError
from normscope.models.versions import refuse_old_transformers
from normscope.view.wording import COMMAND_LINE


def _hide_flag_metavars(parameters: list[Any]) -> list[Any]:
    """Remove the value placeholder of flags from the help."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command whose help shows flags without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_metavars(super().get_params(ctx))


class Commands(TyperGroup):
    """Prints a NormscopeError in one line with exit code 1; Ctrl-C exits with code 130."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_metavars(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            refuse_old_transformers()
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

COMMANDS: dict[str, Callable[..., None]] = {  # in the order of --help
    "demo": demo.demo_command,
    "analyze": analyze.analyze_command,
    "flow": flow.flow_command,
    "explain": explain.explain_command,
    "serve": serve.serve_command,
    "corpus": corpus.corpus_command,
    "compare": compare.compare_command,
    "align": align.align_command,
    "paper": paper.paper_command,
    "faithfulness": faithfulness.faithfulness_command,
    "check": check.check_command,
    "models": models.models_command,
    "derive": derive.derive_command,
}
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normscope {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """The `normscope` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Tokens may contain characters that the terminal cannot encode.
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="normscope")
    except KeyboardInterrupt:
        sys.exit(130)
