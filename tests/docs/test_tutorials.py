"""The notebooks run for a reader who has the package and the default model, and print what they were committed with."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

pytest.importorskip("nbclient")

from docs.make_tutorials import (
    MODELS,
    execute,
    fill_cache,
    hub_models,
    local_models,
    notebooks,
    printed_texts,
    uses_fallback,
)


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run it from top to bottom"
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert not uses_fallback(notebook), "its outputs are those of random weights"
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_needs_nothing_of_the_tests(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "environ" not in text
    assert "NORMSCOPE_" not in text


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_the_same(path: Path) -> None:
    if hub_models(path) and not local_models():
        pytest.skip("it loads a model of the hub, which is read from the folder that NORMSCOPE_TEST_DATA names")
    assert printed_texts(execute(path, local_models())) == printed_texts(nbformat.read(path, as_version=4)), (
        "run `make tutorials`"
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in notebooks() if hub_models(path)], ids=lambda path: path.stem)
def test_a_notebook_runs_where_the_hub_cannot_be_reached(path: Path) -> None:
    assert uses_fallback(execute(path, offline=True))


def test_a_folder_is_found_as_if_it_had_been_downloaded(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    (name, folder), *_ = MODELS.items()
    (tmp_path / "models" / folder).mkdir(parents=True)
    (tmp_path / "models" / folder / "config.json").write_text("{}")
    fill_cache(tmp_path / "cache", tmp_path / "models")
    found = hub.try_to_load_from_cache(name, "config.json", cache_dir=tmp_path / "cache")
    assert Path(found).read_text() == "{}"
    fill_cache(tmp_path / "empty", None)
    assert hub.try_to_load_from_cache(name, "config.json", cache_dir=tmp_path / "empty") is None
