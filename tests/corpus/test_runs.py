"""Corpus runs: tables, resuming after anything, faults, engines."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import normscope
from normscope import Analyzer, NormscopeError, corpus, default_model
from normscope.corpus import engines, measure_registry, store, writing
from normscope.corpus.plan import Plan
from tests.helpers.toys import WORDS as VOCABULARY
from tests.helpers.toys import save_model

WORDS = [word for word in VOCABULARY if word.isalpha()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=24)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    generator = random.Random(0)
    lines = [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(41)]
    path = tmp_path / "data.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def tables(folder: Path) -> dict[str, bytes]:
    """Every table and map of a run, as bytes; half-written files of a killed process begin with a dot."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.glob("*/[!.]*"))
        if path.suffix in {".parquet", ".safetensors"}
    }


def quick(data: Path, model: Path, out: Path, **options: Any) -> corpus.Summary:
    return corpus.run(data, model, out, **{"shard_size": 8, "batch_size": 3, "measures": ["mixing"]} | options)


def test_tables(data: Path, folder: Path, tmp_path: Path) -> None:
    names = ["mixing", "similarity", "category_sums", "value_norms", "vector_norms"]
    summary = quick(data, folder, tmp_path / "run", measures=names, maps=["layer"])
    assert (summary.entries, summary.done, summary.faults, summary.finished) == (41, 41, 0, True)
    run = corpus.open(tmp_path / "run")
    assert set(run.tables) == {"items", "maps", *names}
    assert run.finished
    assert run.verify() == []
    lens = Analyzer.from_pretrained(folder)
    line = data.read_text().splitlines()[5]
    alone = lens.analyze(line, heads=True)
    rows = run.scan("mixing").filter(pl.col("id") == "data.txt:6").collect()
    assert rows.height == len(alone.scopes) * len(alone.layers) * len(alone.tokens)
    one = rows.filter((pl.col("scope") == "ATTNRESLN-N") & (pl.col("layer") == 1))
    torch.testing.assert_close(
        torch.tensor(one["mixing"].to_list()), alone.mixing_ratio("ATTNRESLN-N")[1], atol=1e-5, rtol=1e-5
    )
    assert one["token"].to_list() == list(alone.tokens)
    torch.testing.assert_close(run.map("data.txt:6", "ATTNRESLNFFRESLN-N"), alone["layer"], atol=1e-5, rtol=1e-5)
    norms = run.scan("value_norms").filter((pl.col("id") == "data.txt:6") & (pl.col("layer") == 0)).collect()
    assert alone.value_norms is not None
    torch.testing.assert_close(
        torch.tensor(norms["norm"].to_list()), alone.value_norms[0].flatten(), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(NormscopeError, match="no map"):
        run.map("data.txt:6", "ATTN-N")
    with pytest.raises(NormscopeError, match="mixing"):
        run.scan("mixin")


def test_other_tools_read_the_folder_as_it_is(data: Path, folder: Path, tmp_path: Path) -> None:
    import duckdb

    quick(data, folder, tmp_path / "run")
    found = duckdb.sql(f"select count(distinct id) from '{tmp_path}/run/mixing/*.parquet'").fetchall()
    assert found == [(41,)]


def test_a_finished_run_does_nothing(data: Path, folder: Path, tmp_path: Path) -> None:
    quick(data, folder, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = quick(data, folder, tmp_path / "run")
    assert again.computed == 0
    assert "were done before" in str(again)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "said"),
    [({"batch_size": 4}, "batch_size"), ({"measures": ["similarity"]}, "measures"), ({"mask_seed": 1}, "mask_seed")],
)
def test_another_option_is_refused(data: Path, folder: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    quick(data, folder, tmp_path / "run")
    with pytest.raises(NormscopeError, match=said):
        quick(data, folder, tmp_path / "run", **change)


def test_other_data_and_another_model_are_refused(data: Path, folder: Path, tmp_path: Path) -> None:
    quick(data, folder, tmp_path / "run")
    changed = Analyzer.from_pretrained(folder)
    with torch.no_grad():
        next(changed.loaded.base.parameters())[0, 0] += 1e-3
    with pytest.raises(NormscopeError, match=r"model\.fingerprint"):
        quick(data, changed, tmp_path / "run")  # type: ignore[arg-type]
    data.write_text(data.read_text() + WORDS[0] + "\n")
    with pytest.raises(NormscopeError, match=r"data\.fingerprint"):
        quick(data, folder, tmp_path / "run")


def test_a_damaged_shard_is_done_again(data: Path, folder: Path, tmp_path: Path) -> None:
    quick(data, folder, tmp_path / "run", maps=["layer"])
    whole = tables(tmp_path / "run")
    flipped = tmp_path / "run" / "mixing" / "000001.parquet"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(bytes(content))
    cut = tmp_path / "run" / "maps" / "000003.safetensors"
    cut.write_bytes(cut.read_bytes()[:-7])
    (tmp_path / "run" / "items" / "000004.parquet").unlink()
    assert len(corpus.open(tmp_path / "run").verify()) == 3
    again = quick(data, folder, tmp_path / "run", maps=["layer"])
    assert again.computed == 24
    assert tables(tmp_path / "run") == whole


def test_rows_do_not_depend_on_batches_or_shards(data: Path, folder: Path, tmp_path: Path) -> None:
    frames = []
    for number, (batch, shard) in enumerate([(3, 8), (16, 64), (1, 5)]):
        out = tmp_path / f"run{number}"
        quick(data, folder, out, batch_size=batch, shard_size=shard)
        frames.append(corpus.open(out).scan("mixing").sort("id", "scope", "layer", "position").collect())
    for frame in frames[1:]:
        assert frame.drop("mixing", "remainder").equals(frames[0].drop("mixing", "remainder"))
        for column in ("mixing", "remainder"):
            torch.testing.assert_close(frame[column].to_torch(), frames[0][column].to_torch(), atol=1e-5, rtol=1e-5)


def test_masking(data: Path, folder: Path, tmp_path: Path) -> None:
    quick(data, folder, tmp_path / "a", mask_seed=3)
    quick(data, folder, tmp_path / "b", mask_seed=3, shard_size=5, batch_size=7)
    a, b = (corpus.open(tmp_path / name).scan("items").sort("id").collect() for name in "ab")
    assert a["tokens"].to_list() == b["tokens"].to_list()
    for tokens in a["tokens"].to_list():
        assert tokens.count("[MASK]") == max(1, int(0.12 * (len(tokens) - 2)))


def authors_masks(lines: list[list[str]], seed: int = 0) -> list[list[int]]:
    """The masked positions of tokens in order, with the generator that everyone shares, as the papers' code has it."""
    random.seed(seed)
    found = []
    for tokens in lines:
        candidates = [n for n, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]", "[PAD]")]
        found.append(sorted(random.sample(candidates, max(1, int(len(candidates) * 0.12)))))
    return found


def masked_in(out: Path) -> dict[str, list[int]]:
    items = corpus.open(out).scan("items").collect()
    return {id: [n for n, one in enumerate(tokens) if one == "[MASK]"] for id, tokens in items["id", "tokens"].rows()}


def test_the_authors_masks(data: Path, folder: Path, tmp_path: Path) -> None:
    lines = data.read_text().splitlines()
    lines[3] = " ".join(WORDS * 3)  # longer than the model's positions: draws nothing
    data.write_text("\n".join(lines) + "\n")
    quick(data, folder, tmp_path / "plain")
    before = dict(corpus.open(tmp_path / "plain").scan("items").collect()["id", "tokens"].rows())
    order = [f"data.txt:{n}" for n in range(1, 42) if n != 4]
    expected = dict(zip(order, authors_masks([before[id] for id in order]), strict=True))
    options: dict[str, Any] = {"mask_seed": 0, "mask_draw": "authors"}
    quick(data, folder, tmp_path / "run", **options)
    assert masked_in(tmp_path / "run") == expected
    whole = tables(tmp_path / "run")
    (tmp_path / "run" / "shards" / "000002.json").unlink()
    assert quick(data, folder, tmp_path / "run", **options).computed == 8
    assert tables(tmp_path / "run") == whole
    quick(data, folder, tmp_path / "others", **options, shard_size=5, batch_size=7)
    assert masked_in(tmp_path / "others") == expected
    quick(data, folder, tmp_path / "first", **options, limit=10)
    assert masked_in(tmp_path / "first") == {id: expected[id] for id in order[:9]}
    with pytest.raises(NormscopeError, match=r"options\.mask_draw: was 'authors', is None"):
        quick(data, folder, tmp_path / "run", mask_seed=0)
    with pytest.raises(NormscopeError, match="mask_draw must be one of sequence, authors"):
        quick(data, folder, tmp_path / "run", mask_seed=0, mask_draw="papers")


def test_faults_are_listed_and_the_rest_is_done(data: Path, folder: Path, tmp_path: Path) -> None:
    lines = data.read_text().splitlines()
    lines[7] = " ".join(WORDS * 3)  # longer than the model's positions
    lines[20] = "   "
    data.write_text("\n".join(lines) + "\n")
    summary = quick(data, folder, tmp_path / "run")
    errors = corpus.open(tmp_path / "run").scan("errors").collect()
    assert summary.faults == errors.height >= 1
    assert "data.txt:8" in errors["id"].to_list()
    assert "positions" in errors.filter(pl.col("id") == "data.txt:8")["reason"][0]
    with pytest.raises(NormscopeError, match=r"data\.txt:8"):
        quick(data, folder, tmp_path / "strict", strict=True)
    finished = corpus.open(tmp_path / "strict")
    assert not finished.finished


def test_an_own_measure(data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.measures()  # imports all, so that none is registered in the copy only
    monkeypatch.setattr(measure_registry, "_measures", dict(measure_registry._measures))

    @normscope.register_measure("top", scopes=["layer"])
    def top(analysis: Any) -> dict[str, Any]:
        return {"layer": list(analysis.layers), "top": analysis["layer"].amax((1, 2)).tolist()}

    quick(data, folder, tmp_path / "run", measures=["top"])
    frame = corpus.open(tmp_path / "run").scan("top").collect()
    assert frame.columns == ["id", "side", "layer", "top"]
    assert frame.height == 41 * 2
    with pytest.raises(NormscopeError, match="folder"):
        normscope.register_measure("a/b")
    with pytest.raises(NormscopeError, match="mixing"):
        quick(data, folder, tmp_path / "x", measures=["mixin"])


def test_bad_places(data: Path, folder: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").write_text("x")
    with pytest.raises(NormscopeError, match="not empty"):
        quick(data, folder, full)
    with pytest.raises(NormscopeError, match="Cannot create"):
        quick(data, folder, data / "run")
    with pytest.raises(NormscopeError, match="does not contain a corpus run"):
        corpus.open(tmp_path / "nowhere")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text("{}")
    with pytest.raises(NormscopeError, match="manifest"):
        corpus.open(tmp_path / "foreign")
    with pytest.raises(NormscopeError, match="engine"):
        quick(data, folder, tmp_path / "x", engine="cloud")
    with pytest.raises(NormscopeError, match="batch_size"):
        quick(data, folder, tmp_path / "x", batch_size=0)


def test_a_full_disk_loses_nothing(data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = store.Path.write_bytes
    calls = 0

    def failing(self: Path, content: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise OSError(28, "No space left on device")
        return written(self, content)

    monkeypatch.setattr(store.Path, "write_bytes", failing)
    with pytest.raises(NormscopeError, match="No space left"):
        quick(data, folder, tmp_path / "run")
    monkeypatch.undo()
    before = len(writing.Store(tmp_path / "run").done())
    assert before >= 1
    summary = quick(data, folder, tmp_path / "run")
    assert summary.finished
    assert summary.computed == 41 - 8 * before
    quick(data, folder, tmp_path / "whole")
    assert tables(tmp_path / "run") == tables(tmp_path / "whole")


def test_interrupt_finishes_the_shard(data: Path, folder: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 8:
            os.kill(os.getpid(), signal.SIGINT)

    summary = quick(data, folder, tmp_path / "run", progress=interrupt)
    assert 0 < summary.done < 41
    assert quick(data, folder, tmp_path / "run").finished
    quick(data, folder, tmp_path / "whole")
    assert tables(tmp_path / "run") == tables(tmp_path / "whole")


COMMAND = """
import os, signal, sys
from normscope import corpus

left = int(sys.argv[4])  # things that are done to the files of the run before the end comes; 0: it never does


def end(event, arguments):
    global left
    if event in ("open", "os.chmod", "os.rename", "os.remove") and str(arguments[0]).startswith(sys.argv[3]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(end)
corpus.run(sys.argv[1], sys.argv[2], sys.argv[3], shard_size=4, batch_size=3, measures=["mixing"], maps=["layer"])
"""


def test_kill_at_any_moment(data: Path, folder: Path, tmp_path: Path) -> None:
    """kill -9 again and again in the middle of writing, then one complete run: the same bytes as uninterrupted."""

    def begun(left: int) -> int:
        arguments = [sys.executable, "-c", COMMAND, str(data), str(folder), str(tmp_path / "run"), str(left)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(arguments, env=env, stderr=subprocess.DEVNULL).returncode

    generator = random.Random(1)
    for _ in range(4):
        assert begun(generator.randint(1, 60)) == -signal.SIGKILL
    assert begun(0) == 0
    options = {"shard_size": 4, "batch_size": 3, "maps": ["layer"]}
    quick(data, folder, tmp_path / "whole", **options)
    assert tables(tmp_path / "run").keys() == tables(tmp_path / "whole").keys()
    for name, content in tables(tmp_path / "whole").items():
        assert tables(tmp_path / "run")[name] == content, name


def test_many_entries_are_planned_without_holding_them(folder: Path, tmp_path: Path) -> None:
    """Shards are read as they are needed, also past those that are done."""
    seen = 0

    def entries() -> Any:
        nonlocal seen
        for number in range(100_000):
            seen += 1
            yield corpus.Entry(id=str(number), text="a")

    from normscope.corpus.shards import split_into_shards

    shards = split_into_shards(entries(), 64)
    next(shards)
    assert seen <= 65
    assert sum(1 for _ in shards) == 100_000 // 64


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has already ended
        return ""


def _workers() -> list[int]:
    """The Ray workers among the descendants of this process: other tests on this machine have workers too."""
    status = {int(path.parent.name): _content(path) for path in Path("/proc").glob("[0-9]*/status")}
    parents = {pid: re.search(r"^PPid:\s*(\d+)", text, re.MULTILINE) for pid, text in status.items()}

    def ours(pid: int) -> bool:
        while (parent := parents.get(pid)) is not None and pid != os.getpid():
            pid = int(parent[1])
        return pid == os.getpid()

    return [pid for pid in parents if "ray::_RayWorker" in _content(Path(f"/proc/{pid}/cmdline")) and ours(pid)]


@pytest.mark.slow
def test_ray_gives_the_same_rows_and_survives_a_kill(data: Path, folder: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    quick(data, folder, tmp_path / "local")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        killed: list[int] = []

        def kill(done: int, total: int) -> None:
            if done >= 8 and not killed:
                killed.extend(_workers()[:1])
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

        summary = quick(data, folder, tmp_path / "ray", engine="ray", workers=2, progress=kill)
        assert killed
    finally:
        ray.shutdown()
    assert summary.finished
    a, b = (
        corpus.open(tmp_path / name).scan("mixing").sort("id", "scope", "layer", "position").collect()
        for name in ("local", "ray")
    )
    assert a.drop("mixing", "remainder").equals(b.drop("mixing", "remainder"))
    torch.testing.assert_close(a["mixing"].to_torch(), b["mixing"].to_torch(), atol=1e-5, rtol=1e-5)


def test_ray_needs_a_name(data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NormscopeError, match="name or path"):
        quick(data, Analyzer.from_pretrained(folder), tmp_path / "x", engine="ray")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NormscopeError, match="normscope\\[ray\\]"):
        list(engines.compute_with_ray(lambda: None, Plan(), [], 1, 1, None))


def test_manifest(data: Path, folder: Path, tmp_path: Path) -> None:
    quick(data, folder, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["model"]["family"] == "BERT"
    assert manifest["data"]["entries"] == 41
    assert set(manifest["versions"]) == {"normscope", "transformers", "torch"}


def test_duplicate_ids_are_refused(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "text": "one"}\n{"id": "a", "text": "two"}\n')
    with pytest.raises(NormscopeError, match="occurs twice"):
        quick(data, folder, tmp_path / "run", reader={"text": "text", "id": "id"})


def test_default_model_is_where_it_says() -> None:
    assert default_model.find().is_dir()


def test_command_line(data: Path, folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from normscope.cli import app

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["corpus", *arguments])

    options = ["-m", str(folder), "--shard-size", "8", "--measures", "mixing,similarity", "--maps", "layer"]
    done = call(str(data), *options, "-o", str(tmp_path / "run"))
    assert done.exit_code == 0
    assert "41 of 41 entries done" in done.output
    assert "were done before" in call(str(data), *options, "-o", str(tmp_path / "run")).output
    refused = call(str(data), *options, "--batch-size", "2", "-o", str(tmp_path / "run"))
    assert refused.exit_code == 1
    assert "--batch-size: was 16, is 2" in refused.output
    with data.open("a") as file:
        file.write(" ".join(WORDS * 4) + "\n")
    faulty = call(str(data), *options, "-o", str(tmp_path / "other"))
    assert faulty.exit_code == 3
    assert "1 could not be analysed" in faulty.output
    assert call(str(data), *options, "--strict", "-o", str(tmp_path / "strict")).exit_code == 1
    listed = call("--measures", "list").output.splitlines()
    names = [line.split()[0] for line in listed]
    assert {"mixing", "vector_norms", "uniform_attention", "shapley", "ff_magnitudes"} <= set(names)
    assert [measure.name for measure in measure_registry.find_registered_measures(names)] == names  # each is accepted
    assert all(len(line.split(maxsplit=1)) == 2 for line in listed)
    for nothing in ((), (str(data),), ("-o", str(tmp_path / "x"))):
        refused = call(*nothing)
        assert refused.exit_code == 1
        assert "normscope corpus DATA --out DIR" in refused.output
    table = tmp_path / "data.tsv"
    table.write_text("sentence\tlabel\na cat sat\t1\n")
    assert call(str(table), "-m", str(folder), "--reader", "text=sentence", "-o", str(tmp_path / "tsv")).exit_code == 0
    assert call(str(table), "-m", str(folder), "--reader", "text", "-o", str(tmp_path / "x")).exit_code == 1


def test_masking_needs_a_mask_token(data: Path, folder: Path, tmp_path: Path) -> None:
    model = Analyzer.from_pretrained(folder).model
    with pytest.raises(NormscopeError, match="mask token"):
        quick(data, Analyzer(model), tmp_path / "run", mask_seed=0)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_half_written_files_of_a_killed_process_are_not_part_of_the_run(
    data: Path, folder: Path, tmp_path: Path
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    quick(data, folder, whole)
    with pytest.raises(KeyboardInterrupt):
        quick(data, folder, torn, progress=_stop)
    for name in ("shards/.000001-k3.json", "mixing/.000001-k3.parquet", "items/.000000-x.parquet"):
        (torn / name).write_bytes(b"half")
    assert not corpus.open(torn).finished
    assert corpus.open(torn).scan("mixing").collect().height > 0
    quick(data, folder, torn)
    assert corpus.open(torn).finished
    assert corpus.open(torn).scan("mixing").collect().equals(corpus.open(whole).scan("mixing").collect())


def _stop(done: int, total: int) -> None:
    if done:
        raise KeyboardInterrupt


def test_a_file_where_the_folder_should_be(data: Path, folder: Path) -> None:
    with pytest.raises(NormscopeError, match="is a file"):
        quick(data, folder, data)


def test_a_lost_map(data: Path, folder: Path, tmp_path: Path) -> None:
    quick(data, folder, tmp_path / "run", maps=["weights"], limit=3)
    for path in (tmp_path / "run/maps").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:50])
    run = corpus.open(tmp_path / "run")
    with pytest.raises(NormscopeError, match="missing or damaged"):
        run.map(run.scan("maps").collect()["id"][0], "weights")


@pytest.mark.parametrize(("given", "device"), [([0], "cuda"), ([], None)])
def test_a_worker_computes_where_ray_has_put_it(
    given: list[int], device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "get_gpu_ids", lambda: given)
    asked: list[Any] = []
    engines._RayWorker(lambda **options: asked.append(options), Plan(), torch.get_num_threads())
    assert asked == [{"device": device}]
