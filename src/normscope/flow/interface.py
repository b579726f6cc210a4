"""The interface of a method: its input, and the functions that compute its maps and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from normscope.engine.run import Workspace
from normscope.flow.maps import FrozenModel
from normscope.flow.result import ScoreMatrix, Scores
from normscope.flow.targets import Target
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel

FlowMaps = tuple[Tensor, Tensor | None]  # (layers, rows, columns), and (layers,) the completeness if it decomposes


@dataclass(frozen=True)
class MethodRun:
    """The input of a method."""

    loaded: LoadedModel
    workspace: Workspace
    item: Item
    model: FrozenModel
    option: str  # the part after the colon in "name:option"


@dataclass(frozen=True)
class Method:
    """A way to attribute the last hidden states (maps) or a target (scores) to the input tokens."""

    maps: Callable[[MethodRun], FlowMaps] | None = None
    # None: the row of the map at the target's token. A matrix only for a target with `each`.
    scores: Callable[[MethodRun, Target], Scores | ScoreMatrix] | None = None
    options: tuple[str, ...] = ("",)  # the known options, the default first
    free_option: bool = False  # accepts other options too
    frozen: bool = True  # reads the frozen maps; otherwise it runs the model again, from the states before its layers
    refusal: Callable[[LoadedModel, str], str] | None = None  # why a model cannot be used with an option; "" if it can
