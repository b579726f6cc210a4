"""`normscope derive`: describe a model by watching it, and prove the description."""

from __future__ import annotations

from typing import Annotated

import typer

from normscope.cli import completion, loading, options
from normscope.cli.progress import silence_library_progress


def derive_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=options.MODEL_HELP, show_default=False, autocompletion=completion.complete_model
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, which register_family reads.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
) -> None:
    """Describe a model's layers by watching one short pass, and prove the description on the model.

    Prints the description as Python. Works for types that normscope does not know, and for those that it does.

    Example: normscope derive default
    """
    source = loading.find_model_source(model, device, dtype, revision)
    from normscope.derivation.prove import derive
    from normscope.model_loading import load_source_model
    from normscope.models.description import family_to_json, family_to_python

    with silence_library_progress():
        family = derive(load_source_model(source))
    typer.echo(family_to_json(family) if as_json else family_to_python(family), nl=False)
