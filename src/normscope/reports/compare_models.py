"""Models compared on the same inputs: a corpus run of the first, in which every entry is compared with the others, and
its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from normscope.analyzer import Analyzer
from normscope.corpus.comparison import SCOPES, WHOLE, ComparedSource, common_scopes
from normscope.corpus.readers.data_files import Data
from normscope.corpus.runner import Progress, Summary, run
from normscope.corpus.store import Run
from normscope.errors import NormscopeError, did_you_mean
from normscope.model_loading import load_source
from normscope.models.source import ModelSource
from normscope.reports.comparison_report import comparison_report
from normscope.reports.write import write_report

if TYPE_CHECKING:
    import polars

MEASURES = ("comparison", "compared_units", "compared_pairs")
RUN = "run"  # the folder of the run, in that of the comparison


@dataclass(frozen=True)
class ModelComparison:
    """The comparison of models: its run, and its report if the run is finished."""

    summary: Summary
    report: Path | None

    @property
    def run(self) -> Run:
        """The run, with the tables comparison, compared_units and compared_pairs."""
        return Run(self.summary.folder)

    def table(self) -> polars.LazyFrame:
        """The table of the comparison, with the columns that were kept from the data."""
        return self.run.table("comparison")


def compare(
    models: Sequence[str | Path | ModelSource],
    data: Data,
    out: str | Path,
    *,
    scopes: Iterable[str] | str | None = None,
    gate: str = "ig",
    truncation: bool = False,
    batch_size: int = 16,
    shard_size: int = 128,
    format: str | None = None,
    reader: Mapping[str, Any] | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int = 2,
    threads: int = 1,
    address: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> ModelComparison:
    """Compare the first model with the others on the same inputs: base and fine-tuned, two sizes, or the checkpoints of
    a training in their order.

    For every entry, scope and layer: Spearman's correlation of the maps, the distance of their rows, the mixing ratio,
    the share of the first token, and how much the feed-forward moves; and the tokens and pairs that changed most. Where
    tokenizers differ, tokens are put together to the smallest pieces of the text that both divide alike; where depths
    differ, a layer is compared with that of the same relative depth.

    The same call resumes an interrupted comparison. The report has intervals by a bootstrap over entries and, for more
    than two models, curves over them.

    Args:
        models: Two or more models by name or path.
        data: The entries, as for `normscope.corpus.run`.
        out: The folder: `run` in it is a corpus run, report.html its report.
        scopes: The scopes to compare, by the names that they have in all architectures (default: "weights",
            "attention", "attention-block", "ff" and "layer", as far as all models have them).
        gate: As for `Analyzer.analyze`.
        truncation: Truncate entries that are too long for a model; otherwise they go to the table of errors.
        batch_size: Number of entries per forward pass of the first model.
        shard_size: Number of entries per set of files.
        format: The format of the data (default: from the file name).
        reader: Options of the format's reader.
        engine: "local" (this process) or "ray".
        workers: Number of Ray workers, each with its own copies of the models.
        threads: Threads per Ray worker.
        address: Address of the Ray cluster (default: start one on this machine).
        limit: Read only this many entries.
        progress: A function called with the number of finished entries and of all entries.
        command: The command that compared them, for the page.

    Returns:
        The comparison: `table()`, the folder of its run and the path of its report.

    Raises:
        NormscopeError: If the models cannot be compared, an argument is invalid, or the folder contains another run.
    """
    sources = [ModelSource.of(one) for one in models]
    if len(sources) < 2:
        raise NormscopeError("Comparing takes at least two models.")
    lenses = [load_source(source) for source in sources]
    chosen = _checked_scopes(lenses, scopes)
    others = [asdict(ComparedSource.of(*pair)) for pair in zip(sources[1:], lenses[1:], strict=True)]
    folder = Path(out)
    if folder.is_file():
        raise NormscopeError(f"{folder} is a file. Give a folder for the comparison.")
    summary = run(
        data,
        lenses[0] if engine == "local" else sources[0],
        folder / RUN,
        measures=MEASURES if WHOLE in chosen else MEASURES[:1],
        scopes=chosen,
        settings={"compare": {"models": others, "scopes": chosen}},
        gate=gate,
        truncation=truncation,
        batch_size=batch_size,
        shard_size=shard_size,
        format=format,
        reader=reader,
        engine=engine,
        workers=workers,
        threads=threads,
        address=address,
        limit=limit,
        progress=progress,
    )
    if not summary.finished or summary.faults == summary.entries:
        return ModelComparison(summary, None)
    names = [source.name if source.revision is None else f"{source.name}@{source.revision}" for source in sources]
    return ModelComparison(summary, write_report(comparison_report(Run(summary.folder), names, command), folder))


def _checked_scopes(lenses: Sequence[Analyzer], scopes: Iterable[str] | str | None) -> list[str]:
    """The scopes to compare; raises if the models cannot be compared in them."""
    for lens in lenses:
        if lens.two_sided or lens.loaded.family.input != "text":
            raise NormscopeError(f"{lens.model_name} is no model of one text, and only these can be compared.")
    known = common_scopes(lenses)
    asked = known if scopes is None else [scopes] if isinstance(scopes, str) else list(dict.fromkeys(scopes))
    for scope in asked:
        if scope not in known:
            reason = (
                "one of the models has no such scope" if scope in SCOPES else "it is not a name that all models know"
            )
            raise NormscopeError(
                f"Cannot compare the scope {scope!r}: {reason}.{did_you_mean(scope, known)} Known: {', '.join(known)}."
            )
    return asked
