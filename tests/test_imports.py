"""The import graph: rooms in the order in which data flows, no import upwards, no cycle, none hidden in a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import normscope

SOURCE = Path(normscope.__file__).parent
# Lowest first. A module imports from its own room and from those before it.
ROOMS = (
    ("_version", "errors", "arguments", "files", "plugins", "default_model", "step_progress"),
    ("models",),
    ("inputs",),
    ("tracing",),
    ("decompose",),
    ("measures",),
    (
        "labels",
        "frames",
        "result_base",
        "saving",
        "word_level",
        "word_alignment",
        "analysis",
        "encoder_decoder_analysis",
    ),
    ("engine",),
    ("flow",),
    ("derivation",),
    ("explain",),
    ("analyzer", "model_loading", "checking"),
    ("corpus",),
    ("figure_style", "view"),
    ("reports",),
    ("papers",),
    ("cli", "__main__", "__init__"),
)
PLACE = {name: n for n, names in enumerate(ROOMS) for name in names}
OPTIONAL = {
    "PIL", "anywidget", "datasets", "fastapi", "fsspec", "matplotlib", "numpy", "pandas", "polars", "pyarrow", "ray",
    "scipy", "soundfile", "starlette", "uvicorn", "xarray", "ipywidgets", "IPython", "traitlets", "pydantic",
    "zstandard",
}  # fmt: skip
# Results have plotting methods.
DRAWN = {"normscope.analysis", "normscope.encoder_decoder_analysis", "normscope.result_base", "normscope.flow.result"}
DRAWN |= {"normscope.explain.result", "normscope.corpus.store", "normscope.flow.score_result"}
ALLOWED = {
    # Two classes that refer to each other: either may be in a file.
    ("normscope.analysis", "normscope.encoder_decoder_analysis"): "Analysis.load",
    # Listing families must not wait for transformers.
    ("normscope.models.registry", "transformers"): "start-up time",
    # A subclass of matplotlib's Axes.
    ("normscope.view.figure.maps", "normscope.view.figure.axes"): "an optional package",
}


@dataclass(frozen=True)
class Import:
    """One imported module."""

    source: str
    target: str
    line: int
    function: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Every import of a module."""

    def walk(node: ast.AST, function: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            for_types = typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(name, alias.name, child.lineno, function, typing)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: a relative import"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield Import(name, full if full in known else str(child.module), child.lineno, function, typing)
            yield from walk(child, inside, for_types)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False, False)


def room(name: str) -> int:
    """The place of a module's room; that of the package itself is the last."""
    parts = name.split(".")
    return PLACE[parts[1] if len(parts) > 1 else "__init__"]


def all_imports() -> list[Import]:
    known = modules()
    return [one for name, path in known.items() for one in imports(name, path, known)]


def test_every_module_has_a_room() -> None:
    assert {name.split(".")[1] for name in modules() if "." in name} <= set(PLACE)


def test_nothing_is_imported_upwards() -> None:
    known = modules()
    upwards = [
        f"{one.source}:{one.line} imports {one.target}"
        for one in all_imports()
        if one.target in known and not one.function and not one.typing and room(one.target) > room(one.source)
    ]
    assert not upwards, upwards


def test_there_is_no_cycle() -> None:
    known = modules()
    graph: dict[str, set[str]] = {name: set() for name in known}
    for one in all_imports():
        if one.target in known and one.target != one.source and not one.function and not one.typing:
            graph[one.source].add(one.target)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from error


def test_no_import_hides_in_a_function() -> None:
    """Except of optional packages, of `view` by the results that it draws (it needs those), and for the start-up
    time of the command line, which waits for neither torch nor transformers until it has checked its arguments."""
    hidden = [
        f"{one.source}:{one.line} imports {one.target}"
        for one in all_imports()
        if one.function
        and room(one.source) < room("normscope.cli")
        and one.target.partition(".")[0] not in OPTIONAL
        and (one.source, one.target) not in ALLOWED
        and not (one.source in DRAWN and one.target.startswith("normscope.view."))
    ]
    assert not hidden, hidden


def test_the_exceptions_are_needed() -> None:
    found = {(one.source, one.target) for one in all_imports() if one.function}
    assert set(ALLOWED) <= found
    assert {source for source, target in found if target.startswith("normscope.view.")} >= DRAWN
