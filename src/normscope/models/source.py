"""Models given by name: checked without importing torch, and sent to Ray workers before they are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from normscope.errors import NormscopeError

EXPECTED_MODEL = (
    "Pass a hub name or the path of a folder with config.json, model.safetensors and a tokenizer, or of a GGUF file."
)
DTYPES = ("float32", "float64")


def check_model_folder(name: str) -> None:
    """Raise if `name` can only be a path and does not exist."""
    if (Path(name).is_absolute() or name.startswith(".")) and not Path(name).exists():
        raise NormscopeError(f"Cannot load a model from {name!r}: there is no such folder. {EXPECTED_MODEL}")


@dataclass(frozen=True)
class ModelSource:
    """A model by name, and how to load it."""

    name: str  # on the hub, or the path of a folder or GGUF file
    device: str | None = None  # such as "cuda:1"; None: the CPU, or the GPU that Ray assigns to a worker
    dtype: str | None = None  # "float32" or "float64"; None: float32
    revision: str | None = None  # branch, tag or commit on the hub
    derive: bool = True  # describe a model of an unknown type by watching it, instead of refusing it

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise NormscopeError(f"dtype must be {' or '.join(DTYPES)}, not {self.dtype!r}.")

    @classmethod
    def of(cls, model: str | Path | ModelSource) -> ModelSource:
        """A ModelSource from a name or path."""
        return model if isinstance(model, ModelSource) else cls(str(model))

    def check(self) -> None:
        """Raise on errors that can be found without loading the model."""
        check_model_folder(self.name)
        if self.revision is not None and Path(self.name).exists():
            raise NormscopeError(
                f"revision={self.revision!r} names a version on the Hugging Face hub, but {self.name!r} is a local "
                f"{'folder' if Path(self.name).is_dir() else 'file'}. Leave it out."
            )
