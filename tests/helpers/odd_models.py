"""Architectures that look like none in transformers: odd names, packings and decoys, and layers to be refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.helpers.zoo import randomise

WIDTH, HEADS, SMALL, HIDDEN = 24, 4, 6, 40


@dataclass(frozen=True)
class Shape:
    """How a layer is built."""

    attention: str = "einsum"  # how probabilities and values are multiplied: einsum, bmm, matmul, sdpa
    packed: str = "vkq"  # the order of values, keys and queries in one projection, or "" for three
    before: bool = True  # a norm before each branch
    after: bool = False  # a norm after each branch
    end: bool = False  # a norm after each residual sum
    scale: float = 1.0  # of the branches
    gated: str = ""  # feed-forward: "", "two", "halves", "swapped"
    parallel: bool = False
    decoy: str = ""  # "unused": a projection that is computed and not used; "twin": one more that reads the same
    odd: str = ""  # what makes it impossible, see `OddLayer`
    causal: bool = True
    multiplier: str = ""  # of the branches: "index", "attribute", "parameter"; "stream": of the stream, a parameter
    values: str = ""  # "scaled", "by head": multiplied; "keys": the keys; "tiled": two heads, repeated in turn
    gate: str = ""  # on the mixed values: "sigmoid", "silu"


class OddConfig(PreTrainedConfig):
    model_type = "odd"

    def __init__(self, shapes: Any = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shapes = [list(vars(one).items()) for one in shapes]
        self.num_hidden_layers, self.hidden_size, self.vocab_size = len(self.shapes), WIDTH, 50


class Root(nn.Module):
    """An RMSNorm under another name, whose gain is the exponential of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.log_gain = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.log_gain.exp()


class Mixer(nn.Module):
    def __init__(self, shape: Shape, index: int = 0) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        if shape.packed:
            self.all_three = nn.Linear(WIDTH, 3 * HEADS * SMALL)
        else:
            self.ask, self.tell, self.carry = (nn.Linear(WIDTH, HEADS * SMALL) for _ in range(3))
        self.land = nn.Linear(HEADS * SMALL, WIDTH)
        if shape.values == "by head":
            self.loudness = nn.Parameter(torch.ones(HEADS))
        if shape.gate:
            self.door = nn.Linear(WIDTH, HEADS * SMALL)
        self.twin = nn.Linear(WIDTH, HEADS * SMALL)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        if self.shape.packed:
            parts = dict(zip(self.shape.packed, self.all_three(x).chunk(3, -1), strict=True))
        else:
            parts = {"q": self.ask(x), "k": self.tell(x), "v": self.carry(x)}
        if self.shape.decoy:
            extra = self.twin(x)
            if self.shape.decoy == "twin":
                parts["k"] = parts["k"] + extra
        if self.shape.odd == "tanh values":
            parts["v"] = parts["v"].tanh()
        q, k, v = (parts[name].unflatten(-1, (HEADS, SMALL)).transpose(1, 2) for name in "qkv")
        v = self.change_values(k, v)
        if self.shape.attention == "sdpa":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            weights = (q @ k.transpose(-1, -2) / math.sqrt(SMALL)).masked_fill(~seen, -1e4).softmax(-1)
            if self.shape.attention == "einsum":
                mixed = torch.einsum("bhij,bhjd->bhid", weights, v)
            elif self.shape.attention == "bmm":
                mixed = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (-1, HEADS))
            else:
                mixed = weights @ v
        if self.shape.odd == "squared":
            mixed = mixed.square()
        flat = mixed.transpose(1, 2).flatten(2)
        if self.shape.gate:
            flat = flat * (nn.functional.silu if self.shape.gate == "silu" else torch.sigmoid)(self.door(x))
        return self.land(flat)

    def change_values(self, k: Tensor, v: Tensor) -> Tensor:
        if self.shape.values == "by head":
            return v * self.loudness[:, None, None]
        if self.shape.values == "tiled":
            return v[:, :2].repeat(1, HEADS // 2, 1, 1)
        if self.shape.odd == "other values" and self.index:
            return k
        return {"": v, "scaled": 0.37 * v, "keys": k}[self.shape.values]


class Thinker(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated = shape.gated
        self.wide = nn.Linear(WIDTH, HIDDEN * (2 if shape.gated in ("halves", "swapped") else 1))
        self.other = nn.Linear(WIDTH, HIDDEN)
        self.back = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a = self.wide(x)
        if self.gated == "two":
            return self.back(nn.functional.silu(a) * self.other(x))
        if self.gated:
            first, second = a.chunk(2, -1)
            a, u = (first, second) if self.gated == "halves" else (second, first)
            return self.back(nn.functional.gelu(a) * u)
        return self.back(nn.functional.relu(a))


class OddLayer(nn.Module):
    def __init__(self, shape: Shape, index: int = 0) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        if shape.multiplier == "attribute":
            self.loud = 1 / math.sqrt(index + 1)
        if shape.multiplier in ("parameter", "stream"):
            self.own_scale = nn.Parameter(torch.ones(1))
        self.mix, self.think = Mixer(shape, index), Thinker(shape)
        self.first, self.second, self.third, self.fourth, self.fifth, self.sixth = (Root() for _ in range(6))
        if shape.odd == "two attentions":
            self.again = Mixer(shape)
        if shape.odd == "recurrence":
            self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if shape.odd == "calls a model":
            self.inner = OddModel(OddConfig([Shape()]))
        if shape.odd == "by length":
            self.other = Thinker(shape)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        shape, n = self.shape, x.shape[1]
        seen = mask[:, None, None, :].bool()
        if shape.causal:
            seen = seen & torch.ones(n, n, dtype=torch.bool).tril()
        mix, again = partial(self.mix, seen=seen), partial(getattr(self, "again", self.mix), seen=seen)

        def branch(op: Any, x: Tensor, before: nn.Module, after: nn.Module) -> Tensor:
            y = op(before(x) if shape.before else x)
            return self.branch_factor() * (after(y) if shape.after else y)

        if shape.odd == "recurrence":
            return x + self.memory(x)[0]
        if shape.odd == "skips" and float(x.mean()) > 0:
            return x
        if shape.parallel or (shape.odd == "other branch" and self.index):
            return x + branch(mix, x, self.first, self.third) + branch(self.think, x, self.second, self.fourth)
        x = (self.own_scale * x if shape.multiplier == "stream" else x) + branch(mix, x, self.first, self.third)
        if shape.odd == "two attentions":
            x = x + branch(again, x, self.first, self.third)
        x = self.fifth(x) if shape.end else x
        if shape.odd == "calls a model":
            return x + self.inner(torch.arange(n)[None].expand(len(x), n)).last_hidden_state
        think = self.other if shape.odd == "by length" and n < 7 else self.think
        x = x + branch(think, x, self.first if shape.odd == "one norm" else self.second, self.fourth)
        if shape.odd == "product":
            x = x * self.mix.twin(x).sum(-1, keepdim=True)
        return self.sixth(x) if shape.end else x

    def branch_factor(self) -> Any:
        kind = self.shape.multiplier
        if kind == "index":
            return self.shape.scale / math.sqrt(self.index + 2)
        return self.loud if kind == "attribute" else self.own_scale if kind == "parameter" else self.shape.scale


class OddModel(PreTrainedModel):
    config_class = OddConfig
    base_model_prefix = "odd"

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, WIDTH)
        self.steps = nn.ModuleList(OddLayer(Shape(**dict(one)), n) for n, one in enumerate(config.shapes))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = self.words(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for step in self.steps:
            x = step(x, mask)
        return type("Output", (tuple,), {"last_hidden_state": x})((x,))


def odd_model(*shapes: Shape, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model with one layer for each shape, in evaluation mode."""
    torch.manual_seed(0)
    model = OddModel(OddConfig(shapes))
    randomise(model)
    return model.to(dtype).eval()
