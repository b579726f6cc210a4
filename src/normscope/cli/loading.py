"""The model of a command: checked at once, loaded later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normscope import default_model
from normscope.cli.options import DEFAULT, Precision
from normscope.models.source import ModelSource

if TYPE_CHECKING:
    from normscope import Analyzer


def find_model_source(
    model: str,
    device: str | None = None,
    dtype: Precision | None = None,
    revision: str | None = None,
    derive: bool = True,
) -> ModelSource:
    """The source of the model that these options name; raises if it cannot exist."""
    name = str(default_model.find()) if model == DEFAULT else model
    source = ModelSource(name, device, None if dtype is None else dtype.value, revision, derive)
    source.check()
    return source


def load_analyzer(source: ModelSource) -> Analyzer:
    """Load the model of a source."""
    from normscope.model_loading import load_source

    return load_source(source)
