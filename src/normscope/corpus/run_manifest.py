"""What a run is: where its entries come from, and the manifest with all that its numbers depend on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers

from normscope._version import __version__
from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry, Fault
from normscope.corpus.fingerprints import (
    EntryDigest,
    describe_model_for_manifest,
    file_fingerprint,
    function_fingerprint,
)
from normscope.corpus.line_ranges import LinePlan, can_plan_lines, plan_lines
from normscope.corpus.measure_registry import find_registered_measures
from normscope.corpus.plan import Plan
from normscope.corpus.readers.data_files import Data, distinct_names
from normscope.corpus.readers.first_line import describe_first_line
from normscope.corpus.readers.formats import FORMATS, check_corpus_format, read
from normscope.corpus.store import FORMAT
from normscope.errors import NormscopeError
from normscope.models.scopes import scope_aliases

SIDE_FILES = {"alignments": ("source", "target")}  # format -> options of its reader that name further files


@dataclass(frozen=True)
class RunSource:
    """Where the entries of a run come from."""

    data: Data
    format: str | None
    reader: Mapping[str, Any]  # options of the format's reader
    limit: int | None

    def read_entries(self, tokenizer: Any) -> Iterator[Entry | Fault]:
        """The entries, from the start."""
        options = dict(self.reader)
        if self.format == "pairs":
            options.setdefault("tokenizer", tokenizer)
        return islice(read(self.data, self.format, **options), self.limit)

    def survey(self, tokenizer: Any, shard_size: int, earlier: int) -> Survey:
        """Count and digest the entries; of texts with one entry per line, without making them."""
        format, files = check_corpus_format(self.data, self.format, **self.reader)
        if not can_plan_lines(format, files):
            return survey_entries(self.read_entries(tokenizer), earlier)
        chosen = [file for file in files if not isinstance(file, str)]
        plan, digest, before = plan_lines(chosen, shard_size, self.limit, earlier)
        return Survey(plan.entries, digest, before, plan.faults, plan.first_fault, plan)

    def check_readable(self, survey: Survey) -> None:
        """Refuse data of which no entry can be read, which suggests another format."""
        if survey.faults < survey.entries:
            return
        format, files = check_corpus_format(self.data, self.format, **self.reader)
        looks = describe_first_line(files[0]) if not isinstance(files[0], str) else ""
        raise NormscopeError(
            f"None of the {survey.entries} entries of {files[0]} could be read as {format}. The first: "
            f"{survey.first_fault}{looks} Is it in another format? Use format= with one of {', '.join(FORMATS)}."
        )

    def file_fingerprints(self) -> dict[str, str]:
        """The digests of the files that are read, by name, so that a change can be told by the file's name."""
        format, given = check_corpus_format(self.data, self.format, **self.reader)
        further = (self.reader.get(option) for option in SIDE_FILES.get(format, ()))
        paths = [one for one in given if isinstance(one, Path)] + [Path(one) for one in further if one is not None]
        there = [path for path in paths if path.is_file()]
        return {name: file_fingerprint(path) for name, path in zip(distinct_names(there), there, strict=True)}


@dataclass(frozen=True)
class Survey:
    """The entries of a run, counted before anything is computed."""

    entries: int
    fingerprint: str  # of all entries
    earlier: str  # of as many entries as an earlier run has
    faults: int = 0  # entries that cannot be read
    first_fault: str = ""
    lines: LinePlan | None = None  # where the entries of each shard are, if they can be read from there


def survey_entries(entries: Iterable[Entry | Fault], earlier: int) -> Survey:
    """Count and digest the entries, after a check that their ids are unique."""
    seen: set[int] = set()
    digest, before, faults, first = EntryDigest(), "", 0, ""
    for number, entry in enumerate(entries, 1):
        seen.add(hash(entry.id))
        if len(seen) != number:
            raise NormscopeError(f"The id {entry.id!r} occurs twice (entry {number}). Ids must be unique.")
        digest.add(entry)
        if isinstance(entry, Fault):
            faults, first = faults + 1, first or str(entry)
        if number == earlier:
            before = digest.value()
    return Survey(len(seen), digest.value(), before, faults, first)


def make_run_manifest(lens: Analyzer, source: RunSource, survey: Survey, plan: Plan) -> dict[str, Any]:
    """The manifest of a run."""
    measures = find_registered_measures(plan.measures)
    return {
        "format": FORMAT,
        "model": describe_run_model(lens, plan),
        "data": {
            "path": str(source.data) if isinstance(source.data, str | PathLike) else [str(one) for one in source.data],
            "format": source.format,
            "options": {key: value for key, value in source.reader.items() if key != "tokenizer"},
            "limit": source.limit,
            "entries": survey.entries,
            "fingerprint": survey.fingerprint,
            "files": source.file_fingerprints(),
        },
        "options": plan.to_manifest(),
        "code": {measure.name: function_fingerprint(measure.columns) for measure in measures},
        "memory": {"budget": plan.memory_budget},
        "aliases": {alias: name for stack in lens.loaded.stacks for alias, name in scope_aliases(stack.blocks).items()},
        "versions": package_versions(),
    }


def describe_run_model(lens: Analyzer, plan: Plan) -> dict[str, Any]:
    """The model's part of the manifest. Measures of a whole Sample may use the model's head, so it is included."""
    head = any(measure.whole for measure in find_registered_measures(plan.measures))
    return describe_model_for_manifest(lens, head)


def package_versions() -> dict[str, str]:
    """The versions of the packages that compute."""
    return {
        "normscope": __version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
    }
