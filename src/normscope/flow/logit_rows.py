"""The logits of the positions that a target reads: no other row of the vocabulary's projection is computed."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.flow.maps import FrozenModel
from normscope.flow.resolve import TargetRequest, resolve_target
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel

FEW = 8  # rows computed at least, so that a step of the head is recognised by more than one


def logit_rows_of_target(loaded: LoadedModel, item: Item, request: TargetRequest) -> Tensor | None:
    """The positions, ascending, whose logits a target needs; None for all: if the model cannot leave rows out, or if
    the target cannot be read before the logits are known."""
    if not computes_chosen_logit_rows(loaded, item):
        return None
    tokens, words = len(item.sides[loaded.stacks[-1].side].names), loaded.model.get_output_embeddings().weight.shape[0]
    unknown = torch.zeros(1, device=loaded.base.device).expand(tokens, words)
    try:
        read = resolve_target(loaded, FrozenModel((), logits=unknown), item, request).rows
    except NormscopeError:
        return None
    last = torch.arange(max(0, tokens - FEW), tokens, device=read.device)
    rows = torch.cat([read, last]).unique()
    return rows if len(rows) < tokens else None


def computes_chosen_logit_rows(loaded: LoadedModel, item: Item) -> bool:
    """Whether the model can be asked for the logits of some positions only."""
    supported = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
    weight = getattr(loaded.model.get_output_embeddings(), "weight", None)
    if not supported or loaded.stacks[-1].side != "decoder" or weight is None:
        return False
    # With hooks before the base, the model may have to be called as the user does.
    return loaded.prompt is None and not item.virtual and not loaded.base._forward_pre_hooks
