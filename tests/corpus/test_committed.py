"""Only what was committed is served: leftovers, copies, damaged bits, odd folder names, and kills at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from normscope import NormscopeError, corpus
from normscope.corpus.committed import COPY, INTERNAL, MANIFEST, PENDING, ShardTarget, marker_numbers, read_marker
from normscope.corpus.shard_tables import ShardFiles
from normscope.corpus.writing import Store, write_pending_files
from tests.helpers.corpus_runs import flip_bit, table_bytes, toy_corpus, toy_run
from tests.helpers.toys import save_model

MAPS: dict[str, Any] = {"maps": ["layer"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=24)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests work on copies of it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    toy_run(data, model, out, **MAPS)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def read_all(folder: Path) -> None:
    """Read every table and map of a run."""
    opened = corpus.open(folder)
    for table in opened.tables:
        opened.scan(table).collect()
    for id, scope, side in opened.scan("maps").select("id", "scope", "side").collect().rows():
        opened.map(id, scope, side)
    assert opened.finished


# Kills at every file operation of a run: the audit hook ends the process before the operation takes place. A process
# that has imported everything forks one child for each run.
SERVER = """
import json, os, signal, sys
from normscope import corpus
from normscope.corpus import runner

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.rmdir")


def run(data, model, out, left, csv):
    count = 0

    def end(event, arguments):
        nonlocal count
        if event in EVENTS and str(arguments[0]).startswith(out):
            count += 1
            if count == left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(end)
    options = {"shard_size": 4, "batch_size": 3, "measures": ["mixing"], "scopes": ["layer"], "maps": ["layer"]}
    corpus.run(data, model, out, csv=csv, **options)
    return count


for line in sys.stdin:
    child, parent = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(parent, str(run(*json.loads(line))).encode())
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(parent)
    _, status = os.waitpid(pid, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), int(os.read(child, 20) or 0)]), flush=True)
    os.close(child)
"""


@pytest.fixture(scope="module")
def killer() -> Iterator[subprocess.Popen[str]]:
    """A process that starts runs and says how they ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    arguments = [sys.executable, "-c", SERVER]
    with subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL, **options) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def killed_run(killer: Any, data: Path, model: Path, out: Path, left: int, csv: bool = False) -> tuple[int, int]:
    """A run that is killed before its operation number `left` on its folder; 0: never. Returns its exit code and, if it
    was not killed, the number of its operations."""
    print(json.dumps([str(data), str(model), str(out), left, csv]), file=killer.stdin, flush=True)
    code, count = json.loads(killer.stdout.readline())
    return code, count


def check_partial(folder: Path, whole: dict[str, bytes]) -> None:
    """Whoever reads the folder at this moment finds rows of committed shards only, each as in a whole run."""
    committed = {name for path in folder.glob("shards/*.json") for name in json.loads(path.read_bytes())["files"]}
    for name, content in table_bytes(folder).items():
        assert name in committed
        assert content == whole[name]
    if (folder / MANIFEST).is_file():
        opened = corpus.open(folder)
        assert opened.verify() == []
        if opened.tables:
            assert opened.scan("items").collect().height == sum(opened.shard_entries())
    if (folder / "mixing").is_dir() and any((folder / "mixing").iterdir()):
        pl.read_parquet(f"{folder}/mixing/*")
        duckdb.sql(f"select count(*) from '{folder}/mixing/*.parquet'").fetchall()


def kills(killer: Any, data: Path, model: Path, finished: Path, folder: Path, moments: Sequence[int]) -> int:
    """Kill runs at these moments, one after the other in one folder until it is done. Returns the number of kills."""
    whole = table_bytes(finished)
    count = attempt = 0
    for moment in moments:
        out = folder / str(attempt)
        code, _ = killed_run(killer, data, model, out, moment)
        check_partial(out, whole)
        if code == -signal.SIGKILL:
            count += 1
            continue
        assert code == 0
        assert table_bytes(out) == whole
        attempt += 1
    out = folder / str(attempt)
    assert killed_run(killer, data, model, out, 0)[0] == 0
    assert table_bytes(out) == whole
    return count


def test_kills(killer: Any, data: Path, model: Path, finished: Path, tmp_path: Path) -> None:
    assert kills(killer, data, model, finished, tmp_path, [3, 14]) >= 1


@pytest.mark.slow
def test_kills_at_every_operation_and_at_random(
    killer: Any, data: Path, model: Path, finished: Path, tmp_path: Path
) -> None:
    """A whole run is killed at each of its operations and finished; then runs are killed at random until they end."""
    whole = table_bytes(finished)
    code, operations = killed_run(killer, data, model, tmp_path / "counted", 0)
    assert code == 0
    assert operations > 50
    count = 0
    for moment in range(1, operations + 1):
        out = tmp_path / f"at{moment}"
        assert killed_run(killer, data, model, out, moment)[0] == -signal.SIGKILL
        check_partial(out, whole)
        assert killed_run(killer, data, model, out, 0)[0] == 0
        assert table_bytes(out) == whole
        shutil.rmtree(out)
        count += 1
    generator = random.Random(5)
    (tmp_path / "random").mkdir()
    moments = [generator.randint(1, 30) for _ in range(330 - min(count, 200))]
    count += kills(killer, data, model, finished, tmp_path / "random", moments)
    assert count >= 300, f"{operations} operations, {count} kills"


def test_a_kill_while_the_manifest_is_written(data: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / PENDING).mkdir(parents=True)
    (out / PENDING / "manifest.json.part").write_bytes(b"{")
    assert toy_run(data, model, out, limit=4).finished
    assert list((out / PENDING).iterdir()) == []
    half = tmp_path / "half"
    (half / INTERNAL).mkdir(parents=True)
    shutil.copy(out / MANIFEST, half / COPY)  # before the manifest itself was written
    assert toy_run(data, model, half, limit=4, batch_size=2).finished


def test_files_that_were_not_committed(data: Path, model: Path, run: Path) -> None:
    """A file of a shard without a marker is neither read nor kept."""
    whole = table_bytes(run)
    (run / "shards" / "000001.json").unlink()
    opened = corpus.open(run)
    assert not opened.finished
    assert opened.scan("items").collect().height == 6
    assert "mixing/000001.parquet" in opened.strays()
    toy_run(data, model, run, **MAPS)
    assert table_bytes(run) == whole


def test_a_stray_copy_adds_no_rows(data: Path, model: Path, run: Path) -> None:
    rows = corpus.open(run).scan("mixing").collect().height
    for name in ("000000 (copy).parquet", "000007.parquet"):
        shutil.copy(run / "mixing" / "000000.parquet", run / "mixing" / name)
    shutil.copy(run / "shards" / "000000.json", run / "shards" / "000009.json")
    opened = corpus.open(run)
    with pytest.raises(NormscopeError, match="another run or shard"):
        opened.scan("mixing")
    (run / "shards" / "000009.json").unlink()
    opened = corpus.open(run)
    assert opened.scan("mixing").collect().height == rows
    assert opened.strays() == ["mixing/000000 (copy).parquet", "mixing/000007.parquet"]
    toy_run(data, model, run, **MAPS)
    assert corpus.open(run).strays() == ["mixing/000000 (copy).parquet"]  # a file of the user stays


def test_a_shard_of_another_run_is_not_served(data: Path, model: Path, run: Path, tmp_path: Path) -> None:
    toy_run(data, model, tmp_path / "other", **MAPS)
    for name in ("shards/000001.json", "mixing/000001.parquet"):
        shutil.copy(tmp_path / "other" / name, run / name)
    assert corpus.open(run).verify() == ["shards/000001.json"]
    with pytest.raises(NormscopeError, match="another run or shard"):
        corpus.open(run).scan("items")


@pytest.mark.parametrize("name", ["a*", "a[1]", "a?b"])
def test_folders_with_pattern_characters(finished: Path, tmp_path: Path, name: str) -> None:
    for other in ("ab", "a1", "acb"):
        shutil.copytree(finished, tmp_path / other)
    folder = Path(shutil.copytree(finished, tmp_path / name))
    assert corpus.open(folder).scan("items").collect().height == 10
    read_all(folder)


def flips(run: Path, moments: int, seed: int) -> None:
    """Flip one random bit after the other: `verify` names the file, and reading everything raises."""
    generator = random.Random(seed)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    for number in range(moments):
        path = files[number % len(files)]
        name = str(path.relative_to(run))
        position = generator.randrange(8 * path.stat().st_size)
        flip_bit(path, position)
        if name == MANIFEST:
            with pytest.raises(NormscopeError, match=r"damaged|not the manifest"):
                corpus.open(run)
        else:
            assert corpus.open(run).verify() == [name]
            if name != COPY and not name.startswith("csv"):
                with pytest.raises(NormscopeError, match=r"damaged|another run"):
                    read_all(run)
        flip_bit(path, position)
    assert corpus.open(run).verify() == []
    read_all(run)


def test_a_flipped_bit_is_noticed_and_not_served(run: Path) -> None:
    flips(run, 30, 1)


@pytest.mark.slow
def test_many_flipped_bits(data: Path, model: Path, run: Path) -> None:
    toy_run(data, model, run, csv=True, **MAPS)
    flips(run, 1000, 2)


def test_letters_of_another_case_in_json_are_noticed(run: Path) -> None:
    path = run / MANIFEST
    content = path.read_bytes()
    at = content.index(b"null") if b"null" in content else content.index(b"true")
    path.write_bytes(content[:at] + content[at : at + 1].upper() + content[at + 1 :])
    with pytest.raises(NormscopeError, match="damaged"):
        corpus.open(run)
    path.write_bytes(content + b"\n")
    with pytest.raises(NormscopeError, match="damaged"):
        corpus.open(run)


@pytest.mark.parametrize(
    "name", [MANIFEST, COPY, "shards/000001.json", "mixing/000001.parquet", "maps/000000.safetensors"]
)
@pytest.mark.parametrize("lost", [False, True])
def test_resuming_repairs(data: Path, model: Path, run: Path, finished: Path, name: str, lost: bool) -> None:
    if lost:
        (run / name).unlink()
    else:
        flip_bit(run / name, 99)
    toy_run(data, model, run, **MAPS)
    assert corpus.open(run).verify() == []
    assert corpus.open(run).finished
    assert table_bytes(run) == table_bytes(finished)
    assert (run / MANIFEST).read_bytes() == (finished / MANIFEST).read_bytes()


def test_verify_on_the_command_line(run: Path) -> None:
    from typer.testing import CliRunner

    from normscope.cli import app

    def call() -> tuple[int, str]:
        result = CliRunner().invoke(app, ["corpus", "verify", str(run)])
        return result.exit_code, result.output

    code, text = call()
    assert code == 0
    assert "10 of 10 entries" in text
    flip_bit(run / "mixing" / "000001.parquet", 99)
    (run / "mixing" / "notes.parquet").write_text("mine")
    code, text = call()
    assert code == 1
    assert "damaged: mixing/000001.parquet" in text
    assert "not part of the run: mixing/notes.parquet" in text
    (run / MANIFEST).write_text("{}")
    code, text = call()
    assert code == 1
    assert "manifest.json" in text


def test_shards_that_workers_wrote(data: Path, model: Path, finished: Path, tmp_path: Path) -> None:
    """Two processes compute the same shards, one is killed before anything is committed: the tables are the same."""
    stored = Store(tmp_path / "run")
    whole = corpus.open(finished)
    shards = []
    for number in marker_numbers(finished):
        marker = read_marker(finished, number, whole.manifest["run"])
        files = {name: (finished / name).read_bytes() for name in marker.files}
        shards.append(ShardFiles(number, marker.entries, marker.faults, files))
    with stored.locked():
        stored.begin({key: value for key, value in whole.manifest.items() if key != "run"})
        assert stored.target.is_reachable()
        assert not ShardTarget(stored.target.folder, "another run").is_reachable()
        assert not ShardTarget(str(tmp_path / "elsewhere"), stored.target.run).is_reachable()
        folder = Path(stored.target.folder)
        write_pending_files(folder, shards[0])  # by a worker that counts as dead
        for shard in shards:
            written = write_pending_files(folder, shard)
            assert table_bytes(folder).keys() == {name for one in shards[: shard.number] for name in one.files}
            stored.write_shard(written)
    assert table_bytes(folder) == table_bytes(finished)
    assert len(list((folder / PENDING).iterdir())) == len(shards[0].files)
    assert toy_run(data, model, folder, **MAPS).computed == 0
    assert list((folder / PENDING).iterdir()) == []
    assert corpus.open(folder).verify() == []
