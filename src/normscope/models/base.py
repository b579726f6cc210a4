"""The part of a model that holds its layers, and what it reads."""

from __future__ import annotations

import inspect
from typing import Any


def base_of(model: Any) -> Any:
    """The model without its head: `base_model`, unless that is only a part of it which does not read the inputs."""
    inside, key = model.base_model, str(getattr(model, "main_input_name", ""))
    reads = key in inspect.signature(inside.forward).parameters
    return inside if reads or key not in inspect.signature(model.forward).parameters else model


def media_key(base: Any) -> str:
    """The name of a model's pictures or sound: its main input, or the first that its forward method has."""
    names = inspect.signature(base.forward).parameters
    keys = (base.main_input_name, "pixel_values", "input_features", "input_values")
    return str(next((key for key in keys if key in names), base.main_input_name))
