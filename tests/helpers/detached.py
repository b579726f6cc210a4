"""The frozen model in autograd: the model's own code, with everything frozen detached from the graph.

Attention probabilities and routing weights are detached, norms divide by a detached statistic, an activation is
``x * detached(g(x) / x)``, or, if it gates another projection, detached altogether. The rest is affine in the states
that enter the first layer, so the gradient of any output times these states is the exact decomposition of that output.
Nothing here is shared with the library that it judges.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers.activations
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.helpers.bert_oracle import PATHS
from tests.helpers.layer_oracle import describe

ACTIVATIONS = [nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh] + [
    one
    for one in vars(transformers.activations).values()
    if isinstance(one, type) and issubclass(one, nn.Module) and one.__module__ == "transformers.activations"
]


def held(x: Tensor, y: Tensor) -> Tensor:
    """y as a constant multiple of x."""
    zero = x == 0
    return x * torch.where(zero, 0, y / torch.where(zero, 1, x)).detach()


def integrated(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, u: Tensor, bend: float = 1e30) -> Tensor:
    """F(a, u) as ``a * integral_0^1 dF/da(ta, tu) dt + u * integral_0^1 dF/du(ta, tu) dt``, the integrals held: by
    Gauss-Legendre rules on the pieces of the path between the places where |ta| or |tu| passes `bend`."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    x, y = (one.detach().double() for one in (a, u))
    turns = torch.stack([(bend / one.abs()).clamp_max(1) for one in (x, y)]).sort(0).values
    ends = [torch.zeros_like(x), *turns, torch.ones_like(x)]
    slopes = [torch.zeros_like(x), torch.zeros_like(x)]
    for low, high in pairwise(ends):
        for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
            t = low + (high - low) * (1 + node) / 2
            at = [(t * one).requires_grad_() for one in (x, y)]
            for total, slope in zip(slopes, torch.autograd.grad(function(*at).sum(), at), strict=True):
                total += weight * (high - low) / 2 * slope
    return a * slopes[0] + u * slopes[1]


@contextmanager
def detached(model: nn.Module, gates: set[int]) -> Iterator[None]:
    """`gates` are the ids of the activation modules that gate another projection."""
    softmax, tanh = torch.softmax, torch.tanh

    def frozen_softmax(x: Tensor, dim: int = -1, dtype: Any = None, **_: Any) -> Tensor:
        return softmax(x, dim, dtype=dtype).detach()

    def activation(cls: type) -> Any:
        own = cls.forward  # type: ignore[attr-defined]

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                y: Tensor = own(self, x)
            return y if id(self) in gates else held(x, y)

        return forward

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "softmax", frozen_softmax))
        stack.enter_context(patch.object(nn.functional, "softmax", frozen_softmax))
        stack.enter_context(patch.object(torch, "tanh", lambda x: held(x, tanh(x.detach()))))
        for cls in ACTIVATIONS:
            stack.enter_context(patch.object(cls, "forward", activation(cls)))
        for module in model.modules():
            if isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
                stack.enter_context(patch.object(module, "forward", norm(module)))
        yield


def norm(module: Any) -> Any:
    epsilon = next(e for e in (getattr(module, n, None) for n in ("eps", "variance_epsilon")) if e is not None)
    weight = 1.0 if module.weight is None else module.weight + (1 if "Gemma" in type(module).__name__ else 0)
    bias = getattr(module, "bias", None)

    def forward(x: Tensor) -> Tensor:
        if isinstance(module, nn.LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        y = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt().detach() * weight
        return y if bias is None else y + bias

    return forward


def layer_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """side -> its layers' names in the base model."""
    kind = model.config.model_type
    if kind in PATHS:
        patterns = {"encoder": PATHS[kind].layers}
    else:
        patterns = {side: stack.layers for side, stack in describe(model.config).items()}
    names = [name for name, _ in model.base_model.named_modules()]
    found = {side: [name for name in names if re.fullmatch(pattern, name)] for side, pattern in patterns.items()}
    return {side: some for side, some in found.items() if some}


class Detached:
    """One input through the detached copy of a model."""

    def __init__(self, model: PreTrainedModel, given: Mapping[str, Tensor], gated: bool = False) -> None:
        """`gated`: the activations inside layers gate another projection."""
        model = copy.deepcopy(model)
        model.set_attn_implementation("eager")
        stacks = layer_names(model)
        self.states: dict[str, list[Tensor]] = {side: [] for side in stacks}  # entering the layers, leaving each
        gates: set[int] = set()
        for side, names in stacks.items():
            for number, name in enumerate(names):
                layer = model.base_model.get_submodule(name)
                if number == 0:
                    layer.register_forward_pre_hook(self._enter(side), with_kwargs=True)
                layer.register_forward_hook(self._leave(side))
                if gated:
                    gates |= {id(m) for m in layer.modules() if isinstance(m, tuple(ACTIVATIONS))}
        with detached(model, gates):
            made = model(**given)
        logits = getattr(made, "logits", None)
        self.logits = None if logits is None else logits[0].reshape(-1, logits.shape[-1])

    def _enter(self, side: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.states[side]:
                return None
            x = args[0] if args else kwargs["hidden_states"]
            leaf = x.detach().clone().requires_grad_()
            self.states[side].append(leaf)
            return ((leaf, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": leaf})

        return hook

    def _leave(self, side: str) -> Any:
        def hook(module: nn.Module, args: Any, made: Any) -> None:
            self.states[side].append(made[0] if isinstance(made, tuple) else made)

        return hook

    def scores(self, row: int, index: int) -> dict[str, Tensor]:
        """side -> (layers + 1, n): a logit by the tokens of the states before each layer, and after the last."""
        assert self.logits is not None
        all_states = [state for states in self.states.values() for state in states]
        found = torch.autograd.grad(self.logits[row, index], all_states, retain_graph=True, allow_unused=True)
        by_state = {
            id(state): (0 * state if gradient is None else gradient * state)[0].sum(-1)
            for state, gradient in zip(all_states, found, strict=True)
        }
        return {
            side: torch.stack([by_state[id(state)] for state in states]).detach()
            for side, states in self.states.items()
        }

    def vectors(self, side: str, sources: list[str], layer: int = -1) -> Tensor:
        """(n, columns, d): the states of a side after a layer, by the tokens that entered these sides."""
        y = self.states[side][layer][0]
        leaves = [self.states[one][0] for one in sources]
        found = torch.zeros(len(y), sum(leaf.shape[1] for leaf in leaves), y.shape[1], dtype=y.dtype)
        for i in range(y.shape[0]):
            for a in range(y.shape[1]):
                slopes = torch.autograd.grad(y[i, a], leaves, retain_graph=True, allow_unused=True)
                found[i, :, a] = torch.cat(
                    [
                        (torch.zeros_like(leaf) if slope is None else slope * leaf)[0].sum(-1)
                        for leaf, slope in zip(leaves, slopes, strict=True)
                    ]
                ).detach()
        return found
