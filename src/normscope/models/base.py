"""The part of a model that holds its layers, and what it reads."""

from __future__ import annotations

import inspect
from typing import Any


def base_of(model: Any) -> Any:
    """The model without its head: `base_model`, unless that is only its layers, which read hidden states."""
    inside = model.base_model
    first = next(iter(inspect.signature(inside.forward).parameters), "")
    return model if first == "hidden_states" else inside


def media_key(base: Any) -> str:
    """The name of a model's pictures or sound: its main input, or the first that its forward method has."""
    names = inspect.signature(base.forward).parameters
    keys = (base.main_input_name, "pixel_values", "input_features", "input_values")
    return str(next((key for key in keys if key in names), base.main_input_name))
