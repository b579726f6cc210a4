"""Analyzers of models that are given by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.models.loading import load_pretrained
from normscope.models.source import ModelSource


def load_source(source: ModelSource, device: str | None = None) -> Analyzer:
    """Load the model of a source. `device` is used if the source names none."""
    device, dtype = _checked_device_and_dtype(source, device)
    return Analyzer.from_pretrained(
        source.name, device=device, dtype=dtype, revision=source.revision, derive=source.derive
    )


def load_source_model(source: ModelSource) -> PreTrainedModel:
    """Load the model of a source alone, without analysing anything."""
    device, dtype = _checked_device_and_dtype(source, None)
    revision = {} if source.revision is None else {"revision": source.revision}
    return load_pretrained(source.name, device, dtype, **revision)[0]


def _checked_device_and_dtype(source: ModelSource, device: str | None) -> tuple[str | None, torch.dtype | None]:
    source.check()
    device = source.device or device
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise NormscopeError(f"Cannot use the device {device!r}: {reason}") from error
    return device, None if source.dtype is None else getattr(torch, source.dtype)


def as_analyzer(model: str | Path | ModelSource | Analyzer, engine: Literal["local", "ray"] = "local") -> Analyzer:
    """The given Analyzer, or that of a source. With Ray the device is for the workers, not for this process."""
    if isinstance(model, Analyzer):
        return model
    source = ModelSource.of(model)
    return load_source(replace(source, device=None) if engine == "ray" else source)
