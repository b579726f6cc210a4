"""The tables of a finished run as CSV files, for people and spreadsheets."""

from __future__ import annotations

import json
from typing import Any

from normscope.corpus.committed import CSV_FOLDER, CSV_SUMS, FileSum, signed_json
from normscope.corpus.shard_tables import import_polars
from normscope.corpus.store import Run
from normscope.files import write_atomically


def write_csv_tables(run: Run) -> None:
    """Write csv/<table>.csv for every table of a run, and their checksums. Does nothing if they are there. Lists are
    written as JSON."""
    folder = run.folder / CSV_FOLDER
    if (folder / CSV_SUMS).is_file() and not run.damaged_csv_files():
        return
    folder.mkdir(exist_ok=True)
    sums = {}
    for table in run.tables:
        path = folder / f"{table}.csv"
        with write_atomically(path) as temporary:
            _csv_frame(run.scan(table)).sink_csv(temporary)
        sums[path.name] = _sum_of_file(path)
    with write_atomically(folder / CSV_SUMS) as temporary:
        temporary.write_bytes(signed_json({"files": sums}))


def _sum_of_file(path: Any) -> list[Any]:
    one = FileSum.of_file(path)
    return [one.size, one.sha256]


def _csv_frame(frame: Any) -> Any:
    """The frame with lists as JSON texts: CSV has none."""
    polars = import_polars()
    lists = [name for name, kind in frame.collect_schema().items() if isinstance(kind, polars.List)]
    as_json = [
        polars.col(name).map_elements(
            lambda values: json.dumps(values.to_list(), ensure_ascii=False), return_dtype=polars.String
        )
        for name in lists
    ]
    return frame.with_columns(as_json)
