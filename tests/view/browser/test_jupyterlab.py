"""A result in a real JupyterLab: the viewer is there and works, and the notebook keeps a picture for other readers."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from normscope.view.server.listening import listen
from tests.helpers.fakes import fake, fake_translation
from tests.helpers.live import eventually
from tests.helpers.tabs import Tab

TOKEN = "0123456789abcdef"
VIEW = "application/vnd.jupyter.widget-view+json"
CODE = "from normscope import Analysis\nresult = Analysis.load('{name}')\nresult"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="JupyterLab is not installed"),
]


def notebook(code: str) -> dict[str, object]:
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": [], "source": code}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a new JupyterLab, and its folder."""
    folder = tmp_path_factory.mktemp("lab")
    fake(heads=2).save(folder / "one.safetensors")
    fake_translation().save(folder / "two.safetensors")
    for name in ("one", "two"):
        code = CODE.format(name=f"{name}.safetensors")
        (folder / f"{name}.ipynb").write_text(json.dumps(notebook(code)))
    with listen(0) as listener:
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    settings = [
        f"--ServerApp.port={port}",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={folder}",
        "--ServerApp.open_browser=False",
        "--ServerApp.allow_root=True",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    own = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *settings],
            stdout=log,
            stderr=log,
            env=os.environ | own | {"OMP_NUM_THREADS": "1", "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")},
        )

    def up() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return httpx.get(f"{address}/api", timeout=60, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        eventually(up, patience=300)
        yield address, folder
    finally:
        process.terminate()
        process.wait(180)


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_result_shows_itself(browser: Browser, lab: tuple[str, Path], name: str) -> None:
    address, folder = lab
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(300_000)
    tab = Tab(context)
    tab.page.goto(f"{address}/lab/tree/{name}.ipynb?reset&token={TOKEN}")
    cell = tab.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell").first
    expect(tab.page.get_by_text("| Idle")).to_be_visible(timeout=300_000)
    cell.locator(".cm-content").click()
    tab.page.get_by_role("button", name=re.compile("^Run this cell")).click()
    output = cell.locator(".jp-OutputArea-output").first
    shown = output.get_by_test_id("map")
    expect(shown).to_be_visible(timeout=300_000)
    expect(output).to_contain_text("some/model")
    before = shown.get_attribute("aria-label") or ""
    assert "outputs by" in before
    shown.click(position={"x": 20, "y": 20})
    expect(output.get_by_test_id("inspector")).to_contain_text("Comes from")
    tab.page.keyboard.press("ArrowDown")  # belongs to the viewer, not to the notebook
    expect(shown).to_have_attribute("aria-label", re.compile("layer 2"))
    tab.page.keyboard.press("d")
    expect(output.get_by_test_id("pairs")).to_be_visible()
    assert tab.page.evaluate("document.querySelectorAll('.jp-CodeCell').length") >= 1
    assert [error for error in tab.errors if "normscope" in error or "anywidget" in error] == []

    cell.locator(".cm-content").click()
    tab.page.keyboard.press("Control+s")

    def saved() -> dict[str, object]:
        text = (folder / f"{name}.ipynb").read_text()  # empty while it is being written
        outputs = json.loads(text)["cells"][0]["outputs"] if text else []
        return outputs[0]["data"] if outputs else {}

    kept = eventually(saved)
    assert {VIEW, "image/png", "text/plain"} <= set(kept)
    assert "some/model" in "".join(kept["text/plain"])
    context.close()
