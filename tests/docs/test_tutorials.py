"""The notebooks run, and print what they were committed with."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("nbclient")

from docs.make_tutorials import executed, needs_data, notebooks, printed


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run it from top to bottom"
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert path.stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_the_same(path: Path) -> None:
    if needs_data(path) and "NORMSCOPE_TEST_DATA" not in os.environ:
        pytest.skip("it reads a model from the folder that NORMSCOPE_TEST_DATA names")
    assert printed(executed(path)) == printed(nbformat.read(path, as_version=4)), "run `make tutorials`"
