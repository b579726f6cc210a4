"""`normscope explain`: what an answer rests on, token by token and source by source."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from normscope.cli import completion, loading, options, texts
from normscope.cli.progress import progress_bars, silence_library_progress
from normscope.errors import NormscopeError
from normscope.view.formats import FLOW_SUFFIXES, check_output_path

if TYPE_CHECKING:
    from normscope import Explanation

SourceOption = Annotated[
    list[Path] | None,
    typer.Option("--source", metavar="FILE", help="Text file that TEXT is asked about, a source. Repeatable."),
]
TemplateOption = Annotated[
    str | None,
    typer.Option("--template", metavar="T", help="How sources and TEXT are joined, such as '{sources} Q: {question}'."),
]
GenerateOption = Annotated[
    int | None, typer.Option("--generate", metavar="N", min=1, help="Explain what the model writes: at most N tokens.")
]
AnswerOption = Annotated[str | None, typer.Option("--answer", metavar="TEXT", help="Explain this answer instead.")]
AgainstOption = Annotated[
    str,
    typer.Option("--against", metavar="TEXT", help="Contrast with another answer, 'runner-up', 'mean' or 'none'."),
]
HopsOption = Annotated[int, typer.Option("--hops", metavar="N", min=0, help="Hops through the answer's reasoning.")]
FinalOption = Annotated[
    str | None, typer.Option("--final", metavar="TEXT", help="Where the final part of the answer begins, for --hops.")
]
GateOption = Annotated[
    str,
    options.completed_option(
        "--gate", "NAME", "How the activation is split over tokens: ig or frozen.", completion.complete_flow_gate
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def explain_command(
    text: options.Text,
    source: SourceOption = None,
    template: TemplateOption = None,
    generate: GenerateOption = None,
    answer: AnswerOption = None,
    against: AgainstOption = "runner-up",
    hops: HopsOption = 0,
    final: FinalOption = None,
    chat: options.Chat = False,
    gate: GateOption = "ig",
    truncate: options.Truncate = False,
    json: JsonOption = False,
    out: options.Files = None,
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Explain what a model writes: how much of the answer comes from each source.

    Prints the answer with the strongest sources beside each sentence. Writes .html, .svg, .pdf, .png, .json and
    .safetensors.

    Example: normscope explain "Who plays?" --source a.txt --source b.txt --generate 60 --model gpt2
    """
    if (generate is None) == (answer is None):
        raise NormscopeError("Say what to explain: either --generate, such as --generate 60, or --answer.")
    for path in out or []:
        check_output_path(path, FLOW_SUFFIXES)
    named = _read_sources(source or [])
    found_source = loading.find_model_source(model, device, dtype, revision, derive)
    text = texts.read_cli_text_argument(text)
    given: dict[str, Any] = {"chat": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    if named or template is not None:
        given |= {"sources": named or None, "template": template}
    with silence_library_progress():
        lens = loading.load_analyzer(found_source)
        given |= {"generate": generate, "answer": answer, "truncation": truncate}
        texts.print_long_estimate(lens.estimate_explanation(**given))
        with progress_bars() as show:
            told = lens.explain(
                **given,
                against=None if against == "none" else against,
                hops=hops,
                final=final,
                gate=gate,
                progress=None if show is None else partial(show, "steps"),
            )
        for path in out or []:
            _write_explanation_file(told, path)
    _print_explanation(told, json, out)


def _read_sources(paths: list[Path]) -> dict[str, str]:
    """The texts of the sources by file name."""
    found: dict[str, str] = {}
    for n, path in enumerate(paths):
        if path.resolve() in [one.resolve() for one in paths[:n]]:
            raise NormscopeError(f"{path} is given twice as a source.")
        name = path.name if path.name not in found else str(path)
        try:
            found[name] = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NormscopeError(f"Cannot read the source {path}: {error}.") from error
    return found


def _print_explanation(told: Explanation, json: bool, out: list[Path] | None) -> None:
    if json:
        from normscope.view.export import explanation_json_text

        typer.echo(explanation_json_text(told))
    elif out:
        typer.echo(f"{told!r}: wrote {', '.join(map(str, out))}")
    else:
        from normscope.view.terminal.explanation import terminal_explanation

        Console(highlight=False).print(terminal_explanation(told))


def _write_explanation_file(told: Explanation, path: Path) -> None:
    from normscope.view.export import export_explanation_json
    from normscope.view.figure.maps import figure_of
    from normscope.view.figure.style import save_figure

    suffix = path.suffix.lower()
    if suffix == ".json":
        export_explanation_json(told, path)
    elif suffix == ".safetensors":
        told.save(path)
    elif suffix == ".html":
        told.to_html(path)
    else:
        save_figure(figure_of(told.plot()), path)
