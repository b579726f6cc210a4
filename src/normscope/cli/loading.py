"""The model that a command names, checked at once and loaded later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normscope import default_model
from normscope.cli.options import DEFAULT, Precision
from normscope.model_source import ModelSource

if TYPE_CHECKING:
    from normscope import Analyzer


def source_of(
    model: str, device: str | None = None, dtype: Precision | None = None, revision: str | None = None
) -> ModelSource:
    """The model that these options name, refused where it cannot be there."""
    name = str(default_model.default_model_folder()) if model == DEFAULT else model
    source = ModelSource(name, device, None if dtype is None else dtype.value, revision)
    source.check()
    return source


def load(source: ModelSource) -> Analyzer:
    """The model itself."""
    return source.load()
