"""What the numbers of a run depend on, as digests: model, tokenizer, entries, and the code of measures."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry, Fault
from normscope.corpus.store import fingerprint

# Entries of a config or of a tokenizer's files that say where it came from, or hold the state of the last call.
PROVENANCE = frozenset(
    (
        *("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "_commit_hash"),
        *("truncation", "padding", "tokenizer_file", "vocab_file", "special_tokens_map_file"),
        *("processor_class", "is_local"),
    )
)

INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
SITES = {"site-packages", "dist-packages"}


def runner_model_fingerprint(lens: Analyzer, head: bool = False) -> str:
    """A digest of the names and values of all weights that an analysis reads, or of the whole model with its `head`.

    The pooler is excluded: it is not read, and is randomly initialised if the checkpoint has none.
    """
    model = lens.model if head else lens.loaded.base
    weights = {name: tensor for name, tensor in model.state_dict().items() if "pooler." not in name}

    def parts() -> Iterator[bytes]:
        for name, tensor in sorted(weights.items()):
            yield name.encode()
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return fingerprint(parts())


def describe_model_for_manifest(lens: Analyzer, head: bool) -> dict[str, Any]:
    """Everything about a model that numbers depend on; its config in full, so that a difference has a name."""
    config = {key: value for key, value in lens.model.config.to_dict().items() if key not in PROVENANCE}
    found = {
        "name": lens.model_name,
        "family": lens.family.name,
        "description": fingerprint([_plain_form(lens.family).encode()]),
        "dtype": str(lens.dtype).removeprefix("torch."),
        "fingerprint": runner_model_fingerprint(lens, head),
        "structure": fingerprint([str(lens.loaded.base).encode()]),  # classes, sizes and eps of all modules
        "config": json.loads(json.dumps(config, default=str)),
        "tokenizer": _tokenizer_fingerprint(lens.tokenizer),
    }
    return found if lens.revision is None else found | {"revision": lens.revision}


def _tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """A digest of the files that a tokenizer or processor saves, whatever their place and formatting."""
    if tokenizer is None:
        return None
    if not hasattr(tokenizer, "save_pretrained"):
        return type(tokenizer).__qualname__

    def parts(folder: Path) -> Iterator[bytes]:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield path.name.encode()
                content = path.read_bytes()
                if path.suffix == ".json":
                    kept = {key: value for key, value in json.loads(content).items() if key not in PROVENANCE}
                    content = json.dumps(kept, sort_keys=True).encode()
                yield content

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return fingerprint(parts(Path(folder)))


class EntryDigest:
    """A running digest of entries: all that numbers depend on, and the reasons of faults."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, entry: Entry | Fault) -> None:
        """Add an entry."""
        if isinstance(entry, Fault):
            self._digest.update(repr((entry.id, entry.reason)).encode("utf-8", "surrogatepass"))
            return
        links = sorted(entry.sure), sorted(entry.possible)
        whole = (entry.id, entry.text, entry.pair, entry.words, entry.pieces, entry.surface, entry.spans)
        rest = (entry.entities, entry.label, entry.target, links, entry.kept)
        self._digest.update(repr((whole, rest)).encode("utf-8", "surrogatepass"))

    def value(self) -> str:
        """The digest of the entries so far."""
        return self._digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def function_fingerprint(function: Callable[..., Any]) -> str:
    """A digest of what a function does: its bytecode and constants, and those of the functions and plain values of its
    own package that it names, however far. Comments, docstrings and formatting do not count.

    It begins with the version of Python, whose bytecode it reads.
    """
    seen: set[Any] = set()
    parts = list(_function_parts(function, seen))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{version}:{fingerprint(part.encode('utf-8', 'surrogatepass') for part in parts)}"


def _function_parts(function: Any, seen: set[Any]) -> Iterator[str]:
    function = getattr(function, "__wrapped__", function)
    if id(function) in seen or not isinstance(function, FunctionType):
        return
    seen.add(id(function))
    yield from _code_parts(function.__code__, function.__doc__)
    yield _plain_form(function.__defaults__)
    yield _plain_form(function.__kwdefaults__)
    for cell in function.__closure__ or ():
        yield from _value_parts(_cell_content(cell), function, seen)
    for name in sorted(_names_in_code(function.__code__)):
        if name in function.__globals__ and not _is_state(name, function):
            yield name
            yield from _value_parts(function.__globals__[name], function, seen)


def _value_parts(value: Any, reader: FunctionType, seen: set[Any]) -> Iterator[str]:
    """What a value that a function reads adds: code that is not another package's, and plain values."""
    if isinstance(value, FunctionType):
        if _is_own_module(value.__module__, reader):
            yield from _function_parts(value, seen)
    elif isinstance(value, type):
        if _is_own_module(value.__module__, reader) and id(value) not in seen:
            seen.add(id(value))
            for name, member in sorted(vars(value).items()):
                member = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(member, FunctionType):
                    yield name
                    yield from _function_parts(member, seen)
    elif isinstance(value, ModuleType):
        if _is_own_module(value.__name__, reader) and (id(value), id(reader)) not in seen:
            seen.add((id(value), id(reader)))  # modules may contain one another
            for name in sorted(_names_in_code(reader.__code__) & set(vars(value))):
                yield name
                yield from _value_parts(vars(value)[name], reader, seen)
    else:
        yield _plain_form(value)


def _is_state(name: str, reader: FunctionType) -> bool:
    """Whether a global value may change while a program runs, and numbers do not depend on it.

    So it is with weak tables, registries of other packages, and tables of this package without the name of a constant.
    """
    value = reader.__globals__[name]
    if not isinstance(value, Mapping | list | set):
        return False
    if type(value).__module__ not in ("builtins", "collections", "types"):
        return not _is_own_module(type(value).__module__, reader)
    return reader.__module__.startswith("normscope.") and not name.isupper()


def _is_own_module(name: str | None, reader: FunctionType) -> bool:
    """Whether a module is of the reader's package, or of no installed package at all."""
    if (name or "").partition(".")[0] == (reader.__module__ or "").partition(".")[0]:
        return True
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return file is not None and not _is_installed(Path(file))


def _is_installed(file: Path) -> bool:
    """Whether a file is of Python or of an installed package: of this environment, the user's, or another one on
    Python's path."""
    return not SITES.isdisjoint(file.parts) or any(file.is_relative_to(folder) for folder in INSTALLED)


def _code_parts(code: CodeType, documentation: str | None) -> Iterator[str]:
    yield code.co_code.hex()
    yield " ".join((*code.co_names, *code.co_varnames, *code.co_freevars))
    for place, constant in enumerate(code.co_consts):
        if isinstance(constant, CodeType):
            yield from _code_parts(constant, None)
        elif place > 0 or constant not in (documentation, None):  # the first place is that of the docstring
            yield _plain_form(constant)


def _names_in_code(code: CodeType) -> set[str]:
    inner = (_names_in_code(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _plain_form(value: Any) -> str:
    """A text for a value of plain data that is the same in every process; of other objects the type alone."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | type(...)):
        return repr(value)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, frozenset | set):
        return f"set({sorted(map(_plain_form, value))})"
    if isinstance(value, Mapping):
        return f"map({sorted((_plain_form(key), _plain_form(one)) for key, one in value.items())})"
    if isinstance(value, list | tuple):
        return f"list({[_plain_form(one) for one in value]})"
    if isinstance(value, re.Pattern):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return fingerprint([value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()])
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({[_plain_form(getattr(value, field.name)) for field in fields(value)]})"
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return f"{value.dtype}{value.shape}{fingerprint([value.tobytes()])}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
