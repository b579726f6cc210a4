"""`make tutorials`: run the notebooks of docs/tutorials and write them with their outputs.

Models of the hub are read from the folder that NORMSCOPE_TEST_DATA names, if it is set. A notebook that falls back to
random weights, because its model cannot be had, is left as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "tutorials"
KEPT = ("text/plain", "image/png")  # what of an output is kept: no widget, whose data would be of megabytes
MODELS = {"Xenova/llama2.c-stories15M": "stories15M"}  # models of the hub -> their folders in the test data's models/
FALLBACK = "random weights"  # what a notebook prints when it cannot load its model
REVISION = "0" * 40


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def hub_models(path: Path) -> list[str]:
    """The models of the hub that a notebook loads."""
    text = path.read_text(encoding="utf-8")
    return [name for name in MODELS if name in text]


def execute(path: Path, models: Path | None = None, offline: bool = False) -> Any:
    """The notebook with new outputs.

    `models` is a folder of models: those of `MODELS` are read from it as if they had been downloaded from the hub.
    With `offline` alone no model of the hub can be had.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": FOLDER}})
    environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with TemporaryDirectory() as cache:
        if models or offline:
            fill_cache(Path(cache), models)
            environment |= {"HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "1"}
        client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _strip(output))]
    return notebook


def fill_cache(cache: Path, models: Path | None) -> None:
    """Lay out a folder of models as huggingface_hub lays out its downloads."""
    for name, folder in MODELS.items():
        if models and (models / folder).is_dir():
            repository = cache / f"models--{name.replace('/', '--')}"
            (repository / "refs").mkdir(parents=True)
            (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
            (repository / "snapshots").mkdir()
            (repository / "snapshots" / REVISION).symlink_to((models / folder).resolve(), target_is_directory=True)


def _strip(output: Any) -> Any:
    """An output without what is not kept; None if nothing of it is."""
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    if "data" in output:
        output.data = {kind: value for kind, value in output.data.items() if kind in KEPT}
        output.metadata = {}
    return output


def printed_texts(notebook: Any) -> list[str]:
    """What each code cell prints."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def uses_fallback(notebook: Any) -> bool:
    """Whether the outputs are those of random weights."""
    return any(FALLBACK in text for text in printed_texts(notebook))


def local_models() -> Path | None:
    """The folder of models in the test data, if there is one."""
    data = os.environ.get("NORMSCOPE_TEST_DATA")
    return Path(data, "models") if data else None


def main() -> None:
    for path in notebooks():
        notebook = execute(path, local_models())
        if uses_fallback(notebook):
            print(f"{path.name} is left as it is: {', '.join(hub_models(path))} cannot be loaded", file=sys.stderr)
            continue
        nbformat.write(notebook, path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
