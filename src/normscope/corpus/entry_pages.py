"""Pages of the viewer for single entries of a run, computed again from its data with its model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from normscope import default_model
from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry
from normscope.corpus.fingerprints import describe_model_for_manifest
from normscope.corpus.plan import Plan
from normscope.corpus.run_manifest import RunSource
from normscope.corpus.shards import draw_masks_in_order, encode_shard
from normscope.corpus.store import Run
from normscope.engine.request import Options, requests_for
from normscope.engine.run import Result, run_batch
from normscope.errors import NormscopeError
from normscope.inputs.item import Item
from normscope.model_loading import load_source
from normscope.models.source import ModelSource


def analyse_entries(
    run: Run, ids: Collection[str], model: str | Path | ModelSource | None = None
) -> Iterator[tuple[str, Result]]:
    """Analyse some entries of a run again, with the run's options: (id, analysis), in the order of the data.

    Args:
        run: The run.
        ids: The entries.
        model: The run's model (default: the name in its manifest).

    Raises:
        NormscopeError: If the model is not that of the run, or the data are not there or differ.
    """
    plan, source = plan_of_run(run), source_of_run(run)
    lens = _model_of_run(run, model)
    entries = source.read_entries(lens.tokenizer)
    requests = requests_for(lens.loaded, Options(plan.scopes, plan.layers, gate=plan.gate, value_bias=plan.value_bias))
    tokens = _stored_tokens(run, ids)
    left = set(ids)
    for entry in draw_masks_in_order(lens, plan, entries) if plan.draws_in_order else entries:
        if not left:
            return
        if entry.id not in left or not isinstance(entry, Entry):
            continue
        left.discard(entry.id)
        (item,) = encode_shard(lens, plan, 0, [entry]).items
        if not isinstance(item, Item) or any(
            tokens.get((entry.id, side)) != [n for n, real in zip(one.names, one.real.tolist(), strict=True) if real]
            for side, one in item.sides.items()
        ):
            raise NormscopeError(f"The data differ from those of the run: {entry.id} has other tokens.")
        yield entry.id, run_batch(lens.loaded, [item], requests, lens.workspace)[0]
    if left:
        raise NormscopeError(f"The data differ from those of the run: there is no entry {min(left)!r}.")


def plan_of_run(run: Run) -> Plan:
    """The options of a run, from its manifest."""
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in run.manifest["options"].items()
    }
    return Plan(**given, memory_budget=int(run.manifest["memory"]["budget"]))


def source_of_run(run: Run) -> RunSource:
    """Where the entries of a run came from, by its manifest."""
    data = run.manifest["data"]
    return RunSource(data["path"], data["format"], data["options"], data["limit"])


def _model_of_run(run: Run, model: str | Path | ModelSource | None) -> Analyzer:
    stored = run.manifest["model"]
    if model is None:
        name = str(default_model.find()) if stored["name"] == default_model.NAME else stored["name"]
        model = ModelSource(name, dtype=stored["dtype"], revision=stored.get("revision"))
    lens = load_source(ModelSource.of(model))
    for head in (False, True):  # whether the run's measures read the model's head
        described = describe_model_for_manifest(lens, head)
        if all(described.get(key) == stored.get(key) for key in {*described, *stored} - {"name", "revision"}):
            return lens
    raise NormscopeError(f"The model {lens.model_name} is not that of the run, {stored['name']}.")


def _stored_tokens(run: Run, ids: Collection[str]) -> dict[tuple[str, str], list[str]]:
    import polars

    rows = run.scan("items").filter(polars.col("id").is_in(list(ids))).select("id", "side", "tokens").collect()
    return {(id, side): list(tokens) for id, side, tokens in rows.iter_rows()}
