"""Analyzers of models that are given by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.models.source import ModelSource


def load_source(source: ModelSource, device: str | None = None) -> Analyzer:
    """Load the model of a source. `device` is used if the source names none."""
    source.check()
    device = source.device or device
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise NormscopeError(f"Cannot use the device {device!r}: {reason}") from error
    dtype = None if source.dtype is None else getattr(torch, source.dtype)
    return Analyzer.from_pretrained(source.name, device=device, dtype=dtype, revision=source.revision)


def as_analyzer(model: str | Path | ModelSource | Analyzer, engine: Literal["local", "ray"] = "local") -> Analyzer:
    """The given Analyzer, or that of a source. With Ray the device is for the workers, not for this process."""
    if isinstance(model, Analyzer):
        return model
    source = ModelSource.of(model)
    return load_source(replace(source, device=None) if engine == "ray" else source)
