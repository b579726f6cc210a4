"""Workflows, hooks, forms and package metadata parse, name existing files, and agree with one another."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pages import ROOT

yaml = pytest.importorskip("yaml")
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
SETTINGS = sorted(GITHUB.rglob("*.yml")) + [
    ROOT / name for name in (".pre-commit-config.yaml", "mkdocs.yml", "CITATION.cff")
]
REPOSITORY = "https://github.com/normscope/normscope"


def read_text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return tomllib.loads(read_text("pyproject.toml"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in load(path)["jobs"].items():
            yield f"{path.name}: {name}", job


def expand(text: str, job: dict[str, Any]) -> list[str]:
    """A line of a job, once for each combination of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    lines = []
    for values in product(*matrix.values()):
        line = text
        for key, value in zip(matrix, values, strict=True):
            line = line.replace("${{ matrix." + key + " }}", str(value))
        lines.append(line)
    return lines


def steps(key: str) -> Iterator[tuple[str, str]]:
    """The values of a key (`run`, `uses`) in the steps of all jobs, by job."""
    for name, job in jobs():
        for step in job.get("steps", []):
            if key in step:
                for line in expand(step[key], job):
                    yield name, line


def python_versions() -> list[str]:
    return load(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]


@pytest.mark.parametrize("path", SETTINGS, ids=name_of)
def test_a_file_of_settings_parses(path: Path) -> None:
    assert isinstance(load(path), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_starts_and_asks_for_little(path: Path) -> None:
    workflow = load(path)
    assert workflow[True], "YAML 1.1 reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert ("uses" in job) != ("runs-on" in job)
        assert "uses" in job or job["timeout-minutes"]
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(workflow["jobs"])
        if called := job.get("uses"):
            assert (ROOT / called).is_file()


def test_only_the_release_may_write() -> None:
    granted = {name: job["permissions"] for name, job in jobs() if "permissions" in job}
    assert granted == {"release.yml: pypi": {"id-token": "write"}, "release.yml: page": {"contents": "write"}}
    (publisher,) = [job for name, job in jobs() if name == "release.yml: pypi"]
    assert publisher["environment"]["name"] == "pypi"
    assert "run" not in str([list(step) for step in publisher["steps"]]), "nothing else may run where PyPI is reached"


def test_the_targets_of_the_workflows_are_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read_text("Makefile"), re.MULTILINE))
    named = set()
    for job, line in steps("run"):
        if line.startswith("make "):
            words = line.split(" > ")[0].split()[1:]
            wanted = {word for word in words if not word.startswith("-") and "=" not in word}
            assert wanted <= targets, f"{job}: {line}"
            named |= wanted
    assert {"test", "test-oldest", "test-newest", "test-poisoned", "test-slow", "docs", "dist"} <= named


def test_workflows_are_thin() -> None:
    others = [line for _, line in steps("run") if not line.startswith("make ")]
    assert len(others) == 1
    assert others[0].startswith("gh release create")


def test_python_versions_agree() -> None:
    about = project()["project"]
    versions = python_versions()
    assert versions == sorted(versions, key=lambda version: tuple(map(int, version.split("."))))
    classified = [one.rpartition(" ")[2] for one in about["classifiers"] if re.search(r"Python :: 3\.\d+$", one)]
    assert classified == versions
    assert about["requires-python"] == f">={versions[0]}"
    assert project()["tool"]["mypy"]["python_version"] == versions[0]
    used = {
        version
        for _, job in jobs()
        for step in job.get("steps", [])
        for version in expand(step.get("with", {}).get("python-version", versions[0]), job)
    }
    assert used == set(versions)
    sentence = f"{', '.join(versions[:-1])} or {versions[-1]}"
    for page in ("README.md", "CONTRIBUTING.md", "docs/quick-start.md"):
        assert f"Python {sentence}" in read_text(page), page


def test_hooks_have_the_pinned_ruff() -> None:
    (local,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    needed = {one for hook in local["hooks"] for one in hook.get("additional_dependencies", [])}
    pinned = dict(line.split("==") for line in read_text("constraints.txt").splitlines() if "==" in line)
    assert f"ruff=={pinned['ruff']}" in needed
    assert {one.partition("==")[0] for one in needed} == {"ruff", "pre-commit-hooks"}


@pytest.mark.parametrize(("length", "refused"), [(71, False), (72, True)])
def test_a_long_commit_subject_is_refused(length: int, refused: bool) -> None:
    (local,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    (hook,) = [hook for hook in local["hooks"] if hook["id"] == "subject"]
    message = "x" * length + "\n\n" + "a long line of the body " * 10
    assert bool(re.search(hook["entry"], message, re.MULTILINE)) == refused


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_a_form_asks_for_something(path: Path) -> None:
    form = load(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_a_wrong_number_comes_with_its_check() -> None:
    assert [path.stem for path in FORMS] == ["1-number-or-model", "2-bug", "3-feature"]
    (check,) = [field for field in load(FORMS[0])["body"] if field.get("id") == "check"]
    assert "`normscope check`" in check["attributes"]["label"]
    assert check["validations"]["required"]


def test_there_is_one_address_of_the_repository() -> None:
    urls = project()["project"]["urls"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} == set(urls)
    assert load(ROOT / "CITATION.cff")["repository-code"] == urls["Repository"] == REPOSITORY
    pages = [*SETTINGS, *map(ROOT.joinpath, ("pyproject.toml", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"))]
    found = [link for page in pages for link in re.findall(r"https://github\.com/[^\s\"')>]+", page.read_text("utf-8"))]
    assert len(found) > 5
    for link in found:
        assert link.startswith(REPOSITORY)
        if kept := re.match(r".*/(?:blob|tree)/main/(.+)", link):
            assert (ROOT / kept[1]).exists(), link
