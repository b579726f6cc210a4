"""`normscope align`: word alignments of a parallel corpus."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli import completion, loading, options
from normscope.cli.corpus import FAULTY
from normscope.cli.progress import progress_bars, silence_library_progress
from normscope.corpus.readers import formats
from normscope.corpus.store import check_store_folder
from normscope.errors import NormscopeError
from normscope.files import check_output_folder, write_atomically

if TYPE_CHECKING:
    from normscope.corpus.word_links import CorpusAlignment
    from normscope.measures.alignment import Hits


class RowSetting(StrEnum):
    """Which row of the decoder aligns a word."""

    AWI = "AWI"
    AWO = "AWO"


class Symmetry(StrEnum):
    """How the two directions of an alignment are joined."""

    intersection = "intersection"
    union = "union"


DataArgument = Annotated[
    str, typer.Argument(metavar="DATA", help="File with the sentence pairs, or with the sources.", show_default=False)
]
TargetArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[TARGET]", help="File with the translations, line by line, if DATA has only the sources."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Write the links to this file instead of printing them."),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Hub name or folder of a translation model.", show_default=False
    ),
]
ScopeOption = Annotated[
    str,
    options.completed_option(
        "--scope", "SCOPE", "Scope with cross-attention to align from.", completion.complete_scope
    ),
]
LayerOption = Annotated[
    int | None,
    typer.Option(
        "--layer",
        "-l",
        metavar="L",
        min=1,
        help="Layer to align from, from 1 (default: the second of six, or AWO: fifth).",
    ),
]
SettingOption = Annotated[
    RowSetting | None,
    typer.Option(
        "--setting",
        help="Rows that read a word (AWI) or write it (AWO) (default: AWI in the lower two thirds of the layers).",
        show_default=False,
    ),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="SHARE",
        help="Link every source word with at least this share of a target word's row (default: the largest).",
    ),
]
SymmetriseOption = Annotated[
    Symmetry | None,
    typer.Option(
        "--symmetrise",
        help="Join each target word's best source word with each source word's best target word.",
        show_default=False,
    ),
]
GoldOption = Annotated[bool, typer.Option("--gold", help="Print the alignment error rate against the links in DATA.")]


def align_command(
    data: DataArgument,
    target: TargetArgument = None,
    out: OutOption = None,
    model: ModelOption = options.DEFAULT,
    scope: ScopeOption = "XATTN-N",
    layer: LayerOption = None,
    setting: SettingOption = None,
    threshold: ThresholdOption = None,
    symmetrise: SymmetriseOption = None,
    gold: GoldOption = False,
    format: options.Format = None,
    reader: options.Reader = None,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 16,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Align the words of a parallel corpus by the cross-attention of a translation model.

    Prints a line in Pharaoh format (0-0 1-2) for each sentence pair; words are what is between spaces. With --out,
    running the same command again resumes.

    Example: normscope align talks.en talks.fr --model Helsinki-NLP/opus-mt-en-fr -o talks.links
    """
    format, given = _parallel_reader(data, target, format, reader)
    _check_out_file(out)
    source = loading.find_model_source(model, device, dtype, revision, derive)
    with silence_library_progress(), progress_bars() as show, _run_folder(out) as folder:
        from normscope.corpus.word_links import align_corpus

        found = align_corpus(
            data,
            loading.load_analyzer(source),
            folder,
            scope=scope,
            layer=None if layer is None else layer - 1,
            setting=None if setting is None else setting.value,
            threshold=threshold,
            symmetrise=None if symmetrise is None else symmetrise.value,
            gold=gold,
            format=format,
            reader=given,
            limit=limit,
            batch_size=batch_size,
            progress=None if show is None else partial(show, "sentence pairs"),
        )
        if not found.summary.finished:
            typer.echo(f"stopped after {found.summary.done} of {found.summary.entries} sentence pairs", err=True)
            if out is not None:
                typer.echo("run the same command again to resume", err=True)
            raise typer.Exit(130)
        _write_links(found, out)
    _print_alignment_summary(found, out, gold)


def _check_out_file(out: Path | None) -> None:
    """Raise if the file cannot be written."""
    if out is None:
        return
    if out.is_dir():
        raise NormscopeError(f"Cannot write {out}: it is a folder. Pass a file name.")
    if not out.parent.is_dir():
        raise NormscopeError(f"Cannot write {out}: the folder {out.parent} does not exist. Create it first.")
    check_output_folder(out.parent)


def _parallel_reader(
    data: str, target: Path | None, format: str | None, reader: list[str] | None
) -> tuple[str | None, dict[str, Any]]:
    """The format of DATA and the options of its reader; raises if a file cannot be read."""
    given = options.parse_cli_reader_options(reader)
    if target is not None:
        if format not in (None, "parallel") or "target" in given:
            raise NormscopeError(
                "TARGET is for two files of lines: leave TARGET out, or --format and --reader target=."
            )
        format, given = "parallel", {**given, "target": str(target)}
    formats.check_corpus_format(data, format, **given)
    return format, given


@contextmanager
def _run_folder(out: Path | None) -> Iterator[Path]:
    """The folder of the run: beside the output, where the same command finds it again until it is finished."""
    if out is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    folder = out.with_name(f".{out.name}.run")
    check_store_folder(folder)
    yield folder
    shutil.rmtree(folder)  # not after an exception


def _write_links(found: CorpusAlignment, out: Path | None) -> None:
    if out is None:
        for line in found.lines:
            typer.echo(line)
        return
    with write_atomically(out) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in found.lines), encoding="utf-8")


def _print_alignment_summary(found: CorpusAlignment, out: Path | None, gold: bool) -> None:
    """Print what was done, beside the links on standard error; exit with code 3 if some pairs could not be aligned."""
    where = "" if out is None else f"{out}: "
    rows = {"AWI": "rows that read a word", "AWO": "rows that write a word"}[found.setting]
    typer.echo(
        f"{where}{len(found.lines)} sentence pairs, {found.every.links} links from {found.scope} in layer "
        f"{found.layer + 1}, {found.setting} ({rows}), in {found.summary.seconds:.1f} s",
        err=out is None,
    )
    if gold:
        for name, hits in (("all target words", found.every), ("linked target words", found.linked)):
            typer.echo(_error_rate_line(name, hits), err=out is None)
    for fault in found.faults[:5]:
        typer.echo(f"not aligned: {fault}", err=True)
    if found.faults:
        typer.echo(f"{len(found.faults)} sentence pairs could not be aligned; their lines are empty", err=True)
        raise typer.Exit(FAULTY)


def _error_rate_line(name: str, hits: Hits) -> str:
    return (
        f"{name}: AER {100 * hits.aer:.1f} %, precision {100 * hits.precision:.1f} %, recall {100 * hits.recall:.1f} %"
    )
