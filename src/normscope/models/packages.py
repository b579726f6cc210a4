"""Find the missing package that prevents a checkpoint from loading, and the command that installs it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

EXTRAS = {"sentencepiece": "translation", "protobuf": "translation", "pillow": "vision"}  # extras of normscope
MODULES = {"pillow": "PIL", "protobuf": "google.protobuf"}  # import names that differ from the package name
# Vocabulary files, in SentencePiece or tiktoken format, of tokenizers without a tokenizer.json.
VOCABULARIES = (
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
)
# How errors of transformers name a missing package.
MISSING = (
    r"pip install (?:-\S+ )*([\w-]+)",
    r"[Yy]ou need to install ([\w-]+)",
    r"requires the (\w+) library",
    r"Missing optional dependencies: (\w+)",
    r"The (\w+) dictionary is not installed",
    r"No module named '(\w+)",
)


def missing_package(error: BaseException, readers: Iterable[str] = ()) -> str | None:
    """The missing package that caused an error in transformers; None if the cause is another.

    `readers` are the packages that read the tokenizer's vocabulary. Unless the error is an ImportError they take
    precedence over packages that its message names.
    """
    named = [found[1].lower() for pattern in MISSING for found in re.finditer(pattern, str(error))]
    candidates = [*named, *readers] if isinstance(error, ImportError) else [*readers, *named]
    return next((package for package in candidates if not is_package_installed(package)), None)


def tokenizer_packages(name: str, model_type: str) -> tuple[str, ...]:
    """The packages besides transformers that are needed to read the vocabulary of a tokenizer.

    The errors of transformers do not name them: without sentencepiece it has no tokenizer for Marian models and
    mistakes other vocabularies for tiktoken files.
    """
    if TOKENIZER_MAPPING_NAMES.get(model_type, "") is None:  # transformers found no sentencepiece
        return ("sentencepiece",)
    if _tokenizer_file_for_packages(name, "tokenizer.json") is not None:
        return ()
    found = next(
        (path for path in (_tokenizer_file_for_packages(name, file) for file in VOCABULARIES) if path is not None), None
    )
    if found is None:
        return ()
    return ("tiktoken",) if _needs_tiktoken_package(found) else ("sentencepiece", "protobuf")


def is_package_installed(package: str) -> bool:
    try:
        return find_spec(MODULES.get(package, package.replace("-", "_"))) is not None
    except ModuleNotFoundError:  # the parent package is missing too
        return False


def package_install_command(package: str) -> str:
    """The pip command that installs a package."""
    return f"pip install 'normscope[{EXTRAS[package]}]'" if package in EXTRAS else f"pip install {package}"


def _tokenizer_file_for_packages(name: str, file: str) -> Path | None:
    """A file in a local folder, or in the local cache of a hub model; None if there is no such file."""
    if Path(name).exists():  # a folder, or a GGUF file, which holds its tokenizer
        return Path(name, file) if Path(name, file).is_file() else None
    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def _needs_tiktoken_package(path: Path) -> bool:
    """True if a vocabulary file has lines of base64 tokens and ranks; SentencePiece files are binary."""
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", file.readline(1000)) is not None
