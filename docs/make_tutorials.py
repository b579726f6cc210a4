"""`make tutorials`: run the notebooks of docs/tutorials and write them with their outputs.

The causal model is read from the folder that NORMSCOPE_TEST_DATA names; without it that notebook is left as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "tutorials"
KEPT = ("text/plain", "image/png")  # what of an output is kept: no widget, whose data would be of megabytes


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def needs_data(path: Path) -> bool:
    return "NORMSCOPE_TEST_DATA" in path.read_text(encoding="utf-8")


def executed(path: Path) -> Any:
    """The notebook with new outputs."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": FOLDER}})
    client.execute(env={**os.environ, "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _kept(output))]
    return notebook


def _kept(output: Any) -> Any:
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    if "data" in output:
        output.data = {kind: value for kind, value in output.data.items() if kind in KEPT}
        output.metadata = {}
    return output


def printed(notebook: Any) -> list[str]:
    """What each code cell prints."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def main() -> None:
    for path in notebooks():
        if needs_data(path) and "NORMSCOPE_TEST_DATA" not in os.environ:
            print(f"{path.name} is left as it is: NORMSCOPE_TEST_DATA names no folder", file=sys.stderr)
            continue
        nbformat.write(executed(path), path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
