"""`make tutorials`: run the notebooks in docs/tutorials and save them with their outputs.

If NORMSCOPE_TEST_DATA is set, hub models are read from the folder it names. A notebook that falls back to random
weights, because its model is not available, is left unchanged.
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
KEPT = ("text/plain", "image/png")  # output types to keep; widgets would add megabytes
MODELS = {"Xenova/llama2.c-stories15M": "stories15M"}  # hub model -> its folder in models/ of the test data
FALLBACK = "random weights"  # what a notebook prints when it cannot load its model
REVISION = "0" * 40


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def hub_models(path: Path) -> list[str]:
    """The hub models that a notebook loads."""
    text = path.read_text(encoding="utf-8")
    return [name for name in MODELS if name in text]


def execute(path: Path, models: Path | None = None, offline: bool = False) -> Any:
    """The notebook with new outputs.

    `models` is a folder of models: those in `MODELS` are read from it as if they had been downloaded from the hub.
    With only `offline`, no hub model is available.
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
    """Arrange a folder of models like the download cache of huggingface_hub."""
    for name, folder in MODELS.items():
        if models and (models / folder).is_dir():
            repository = cache / f"models--{name.replace('/', '--')}"
            (repository / "refs").mkdir(parents=True)
            (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
            (repository / "snapshots").mkdir()
            (repository / "snapshots" / REVISION).symlink_to((models / folder).resolve(), target_is_directory=True)


def _strip(output: Any) -> Any:
    """The parts of an output that are kept, or None."""
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
    """Whether the outputs come from random weights."""
    return any(FALLBACK in text for text in printed_texts(notebook))


def local_models() -> Path | None:
    """The folder of models in the test data, if NORMSCOPE_TEST_DATA is set."""
    data = os.environ.get("NORMSCOPE_TEST_DATA")
    return Path(data, "models") if data else None


def main() -> None:
    for path in notebooks():
        notebook = execute(path, local_models())
        if uses_fallback(notebook):
            print(f"{path.name} is unchanged: cannot load {', '.join(hub_models(path))}", file=sys.stderr)
            continue
        nbformat.write(notebook, path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
