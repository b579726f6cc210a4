"""Packages that a checkpoint needs and that are not installed: which one it is, and the command that installs it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

EXTRAS = {"sentencepiece": "translation", "protobuf": "translation", "pillow": "vision"}  # of normscope itself
MODULES = {"pillow": "PIL", "protobuf": "google.protobuf"}  # what is imported, where its name is another one
# The vocabulary of a tokenizer without a tokenizer.json, in the format of SentencePiece or of tiktoken.
VOCABULARIES = (
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
)
# How transformers says that something is not installed.
SAID = (
    r"pip install (?:-\S+ )*([\w-]+)",
    r"[Yy]ou need to install ([\w-]+)",
    r"requires the (\w+) library",
    r"Missing optional dependencies: (\w+)",
    r"The (\w+) dictionary is not installed",
    r"No module named '(\w+)",
)


def missing_package(error: BaseException, readers: Iterable[str] = ()) -> str | None:
    """The package for want of which transformers raised an error; None where that is not the reason. `readers` are what
    the vocabulary of a tokenizer is read with, which goes before what an error says that is no ImportError."""
    named = [found[1].lower() for said in SAID for found in re.finditer(said, str(error))]
    wanted = [*named, *readers] if isinstance(error, ImportError) else [*readers, *named]
    return next((package for package in wanted if not is_installed(package)), None)


def tokenizer_packages(name: str, model_type: str) -> tuple[str, ...]:
    """What reads the vocabulary of a model's tokenizer, as far as it is more than transformers itself.

    transformers does not say so: without sentencepiece it knows of no tokenizer for a Marian model, and takes the
    files of others for tiktoken's.
    """
    if TOKENIZER_MAPPING_NAMES.get(model_type, "") is None:  # left out
        return ("sentencepiece",)
    if _file(name, "tokenizer.json") is not None:
        return ()
    found = next((path for path in (_file(name, file) for file in VOCABULARIES) if path is not None), None)
    if found is None:
        return ()
    return ("tiktoken",) if _is_tiktoken(found) else ("sentencepiece", "protobuf")


def is_installed(package: str) -> bool:
    try:
        return find_spec(MODULES.get(package, package.replace("-", "_"))) is not None
    except ModuleNotFoundError:  # not even the package that it is a part of
        return False


def install_command(package: str) -> str:
    """What installs a package."""
    return f"pip install 'normscope[{EXTRAS[package]}]'" if package in EXTRAS else f"pip install {package}"


def _file(name: str, file: str) -> Path | None:
    """A file of a folder, or of a model of the hub as far as it has been fetched."""
    if Path(name).is_dir():
        return Path(name, file) if Path(name, file).is_file() else None
    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def _is_tiktoken(path: Path) -> bool:
    """Whether a vocabulary is lines of tokens in base64 and their ranks; SentencePiece writes binary files."""
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", file.readline(1000)) is not None
