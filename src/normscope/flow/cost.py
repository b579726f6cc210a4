"""What a flow or an explanation will cost, before it runs."""

from __future__ import annotations

import torch

from normscope.engine.request import Estimate, layer_shape, matmul_rate
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules

# Measured with a Llama of 4 layers of width 512 and 128 to 1,024 tokens, in the time that the products of one forward
# pass take at the machine's peak.
FROZEN = 4.0  # the recorded and checked pass, with one target carried back
EACH_TARGET = 0.85  # another target, carried back with others, or a column of the maps
WRITTEN = 20.0  # a token that is generated with a cache, in products of a single token: all weights are read for it


def flow_cost(loaded: LoadedModel, item: Item, targets: int, written: int = 0) -> Estimate:
    """The estimated memory and time of `targets` directions carried back through an item that the model continues by
    `written` tokens."""
    size = 8 if loaded.dtype == torch.float64 else 4
    passes, memory, longest = 0.0, 0, 0
    for stack, depth, heads in zip(loaded.stacks, loaded.depths, loaded.head_counts, strict=True):
        n = len(item.sides[stack.side].names) + (written if stack is loaded.stacks[-1] else 0)
        layers = layer_modules(loaded.base, stack)
        shape = layer_shape(layers[0], loaded.base.config, heads)
        weights = sum(weight.numel() for weight in {w for layer in layers for w in layer.parameters()})
        passes += 2.0 * n * weights + 4.0 * n * n * shape.width * depth
        memory += size * n * depth * (8 * shape.width + 2 * shape.hidden)
        longest = max(longest, n)
    token = 2.0 * sum(weight.numel() for weight in loaded.model.parameters())
    work = passes * (FROZEN + EACH_TARGET * (targets - 1)) + WRITTEN * token * written
    return Estimate(longest, memory, work / matmul_rate(loaded.dtype, torch.get_num_threads()))
