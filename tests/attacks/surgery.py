"""Attacks on the layers themselves: cut, swapped, repeated, pruned, with other weights."""

import copy
import random
from typing import Any

import torch
from torch import nn

from tests.attacks.recording import NoAnswer, part
from tests.attacks.subject import Inapplicable, Subject, a_layer, a_part, attack


def a_list(rng: random.Random, subject: Subject) -> nn.ModuleList:
    return rng.choice(subject.lists())


def holding(subject: Subject, layers: nn.ModuleList) -> tuple[nn.Module, str]:
    for parent in subject.inside.modules():
        for name, one in parent.named_children():
            if one is layers:
                return parent, name
    raise Inapplicable("nothing holds the list")


@attack(weight=2)
def cut(rng: random.Random, subject: Subject) -> str:
    """`model.encoder.layer = model.encoder.layer[:k]`, the config unchanged."""
    layers = a_list(rng, subject)
    if len(layers) < 2:
        raise Inapplicable("one layer only")
    keep = rng.randrange(1, len(layers))
    parent, name = holding(subject, layers)
    front = rng.random() < 0.6
    setattr(parent, name, layers[:keep] if front else layers[-keep:])
    return f"{'first' if front else 'last'} {keep} of {len(layers)} layers kept"


@attack()
def cut_with_config(rng: random.Random, subject: Subject) -> str:
    """The same, with the number of layers in the config adjusted."""
    said = cut(rng, subject)
    lists = subject.lists()
    config: Any = subject.inside.config
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"):
        if hasattr(config, name):
            setattr(config, name, len(lists[0]))
            break
    for name in ("num_decoder_layers", "decoder_layers"):
        if hasattr(config, name) and len(lists) > 1:
            setattr(config, name, len(lists[1]))
    return said + ", config adjusted"


@attack()
def delete(rng: random.Random, subject: Subject) -> str:
    layers = a_list(rng, subject)
    if len(layers) < 2:
        raise Inapplicable("one layer only")
    number = rng.randrange(len(layers))
    del layers[number]
    return f"layer {number} deleted"


@attack()
def swap(rng: random.Random, subject: Subject) -> str:
    layers = a_list(rng, subject)
    if len(layers) < 2:
        raise Inapplicable("one layer only")
    one, other = rng.sample(range(len(layers)), 2)
    layers[one], layers[other] = layers[other], layers[one]
    return f"layers {one} and {other} swapped"


@attack()
def reverse(rng: random.Random, subject: Subject) -> str:
    layers = a_list(rng, subject)
    parent, name = holding(subject, layers)
    setattr(parent, name, nn.ModuleList(reversed(list(layers))))
    return "layers reversed"


@attack(weight=2)
def repeat(rng: random.Random, subject: Subject) -> str:
    """The same module twice in the list."""
    layers = a_list(rng, subject)
    number, place = rng.randrange(len(layers)), rng.randrange(len(layers) + 1)
    again = list(layers)
    again.insert(place, layers[number])
    parent, name = holding(subject, layers)
    setattr(parent, name, nn.ModuleList(again))
    longer = lengthened(rng, subject, layers)
    return f"layer {number} again at {place}{longer}"


@attack()
def append_copy(rng: random.Random, subject: Subject) -> str:
    layers = a_list(rng, subject)
    number = rng.randrange(len(layers))
    layers.append(copy.deepcopy(layers[number]))
    return f"a copy of layer {number} appended{lengthened(rng, subject, layers)}"


def lengthened(rng: random.Random, subject: Subject, layers: nn.ModuleList) -> str:
    """Half of the time the config counts the new layer: some models run only that many layers."""
    config: Any = subject.inside.config
    if rng.random() < 0.5:
        return ""
    for name in ("num_hidden_layers", "n_layer", "n_layers"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, getattr(config, name) + 1)
            kinds = getattr(config, "layer_types", None)
            if isinstance(kinds, list):
                config.layer_types = [*kinds, kinds[-1]]
            return ", config adjusted"
    return ""


@attack(weight=0.5)
def groups(rng: random.Random, subject: Subject) -> str:
    """ALBERT's groups of layers: one more, one less, in another order."""
    encoder: Any = getattr(subject.base, "encoder", None)
    found = getattr(encoder, "albert_layer_groups", None)
    if found is None:
        raise Inapplicable("no groups")
    kind = rng.choice(["one more", "one less", "reversed", "a copy"])
    if kind == "one less" and len(found) > 1:
        encoder.albert_layer_groups = found[:-1]
    elif kind == "one more":
        found.append(found[0])
    elif kind == "a copy":
        found.append(copy.deepcopy(found[0]))
    else:
        encoder.albert_layer_groups = nn.ModuleList(reversed(list(found)))
    if rng.random() < 0.5:
        subject.inside.config.num_hidden_groups = len(encoder.albert_layer_groups)
    return f"groups: {kind}"


@attack()
def share(rng: random.Random, subject: Subject) -> str:
    """One layer's attention or feed-forward module in another layer as well."""
    layers = subject.layers()
    if len(layers) < 2:
        raise Inapplicable("one layer only")
    one, other = rng.sample(layers, 2)
    if type(one) is not type(other):
        raise Inapplicable("two kinds of layers")
    name = rng.choice([name for name, _ in one.named_children()])
    setattr(other, name, getattr(one, name))
    return f"{name} shared by two layers"


@attack()
def identity_layer(rng: random.Random, subject: Subject) -> str:
    layers = a_list(rng, subject)
    number = rng.randrange(len(layers))
    layers[number] = Passing(rng.random() < 0.3)
    return f"layer {number} replaced by one that does nothing"


class Passing(nn.Module):
    """Returns its input."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self.wrapped else hidden_states


@attack(weight=1.5)
@torch.no_grad()
def prune(rng: random.Random, subject: Subject) -> str:
    """Some heads of one layer taken out of its projections, by hand: transformers has no method for it any more."""
    number, layer = a_layer(rng, subject)
    for names in (
        ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
        ("attention.query", "attention.key", "attention.value", "attention.dense"),
        ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
        ("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o"),
        ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    ):
        try:
            modules = [layer.get_submodule(name) for name in names]
        except AttributeError:
            continue
        if not all(type(m) is nn.Linear for m in modules):
            raise Inapplicable("projections of another class")
        query, key, value, out = modules
        attention = layer.get_submodule(names[0].rpartition(".")[0])
        width = next(
            (int(getattr(attention, n)) for n in ("attention_head_size", "head_dim") if hasattr(attention, n)), 0
        )
        if not width:
            raise Inapplicable("no width of heads")
        heads, shared = query.out_features // width, value.out_features // width
        if shared < 2 or not isinstance(heads // shared, int):
            raise Inapplicable("one head only")
        keep = sorted(rng.sample(range(shared), rng.randrange(1, shared)))
        rows = [n for kv in keep for n in range(kv * width, (kv + 1) * width)]
        group = heads // shared
        wide = [n for kv in keep for n in range(kv * group * width, (kv + 1) * group * width)]
        for module, some in ((query, wide), (key, rows), (value, rows)):
            module.weight = nn.Parameter(module.weight[some].clone())
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias[some].clone())
            module.out_features = len(some)
        out.weight = nn.Parameter(out.weight[:, wide].clone())
        out.in_features = len(wide)
        for name in ("num_attention_heads", "n_heads", "num_heads"):
            if isinstance(getattr(attention, name, None), int):
                setattr(attention, name, len(keep) * group)
        for name in ("all_head_size", "embed_dim"):
            if isinstance(getattr(attention, name, None), int):
                setattr(attention, name, len(wide))
        return f"layer {number}: key-value heads {keep} of {shared} kept"
    raise Inapplicable("no projections that are known")


@attack(weight=1.5)
@torch.no_grad()
def weights(rng: random.Random, subject: Subject) -> str:
    """Zero, NaN, infinite, huge or tiny weights in one part."""
    what, module, _, _ = a_part(rng, subject)
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    if not parameters:
        raise Inapplicable("no weights")
    parameter = rng.choice(parameters)
    kind = rng.choice(["zero", "zero row", "nan", "inf", "huge", "large", "tiny"])
    flat = parameter.data
    if kind == "zero":
        flat.zero_()
    elif kind == "zero row":
        flat[rng.randrange(len(flat))] = 0
    elif kind in ("nan", "inf"):
        flat.view(-1)[rng.randrange(flat.numel())] = float(kind)
    else:
        flat.mul_({"huge": 1e6 if flat.dtype == torch.float64 else 1e3, "large": 30.0, "tiny": 1e-8}[kind])
    return f"{what}: a parameter {kind}"


@attack()
@torch.no_grad()
def embedding_weights(rng: random.Random, subject: Subject) -> str:
    """One word's embedding NaN, huge or zero."""
    embedding: Any = subject.inside.get_input_embeddings()
    table = getattr(embedding, "weight", None)
    if table is None or table.dim() != 2 or "input_ids" not in subject.encoding:
        raise Inapplicable("no table of words")
    kind = rng.choice(["nan", "zero", "huge"])
    row = rng.choice([n for n in (*subject.encoding["input_ids"].flatten().tolist(), 0, 1, 7) if 0 <= n < len(table)])
    table.data[row] = {"nan": float("nan"), "zero": 0.0, "huge": 1e5}[kind]
    return f"embedding of {row} {kind}"


@attack()
def resize_vocabulary(rng: random.Random, subject: Subject) -> str:
    if "input_ids" not in subject.encoding or subject.model is not subject.inside:
        raise Inapplicable("no words")
    size = rng.choice([40, 53, 64])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        subject.inside.resize_token_embeddings(size, mean_resizing=False)
    return f"vocabulary of {size}"


@attack()
def chunks(rng: random.Random, subject: Subject) -> str:
    """The feed-forward in pieces of the sequence."""
    found = [m for m in subject.inside.modules() if hasattr(m, "chunk_size_feed_forward")]
    if not found:
        raise Inapplicable("no pieces")
    for module in found:
        module.chunk_size_feed_forward = 1
    return "feed-forward token by token"


@attack(weight=0.5)
def drop_part(rng: random.Random, subject: Subject) -> str:
    """One part of a layer deleted altogether, or put at another name."""
    what, module, parent, name = a_part(rng, subject)
    delattr(parent, name)
    if rng.random() < 0.5:
        parent.add_module(name + "_old", module)
    return f"{what} deleted"


@attack()
@torch.no_grad()
def fewer_hidden_units(rng: random.Random, subject: Subject) -> str:
    """Hidden units of a feed-forward pruned by hand."""
    number, layer = a_layer(rng, subject)
    for into, out in (("intermediate.dense", "output.dense"), ("ffn", "ffn_output"), ("ffn.lin1", "ffn.lin2"),
                      ("fc1", "fc2"), ("mlp.fc1", "mlp.fc2"), ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")):  # fmt: skip
        try:
            one, two = part(layer, into), part(layer, out)
        except NoAnswer:
            continue
        if type(one) is not nn.Linear or type(two) is not nn.Linear:
            continue
        keep = sorted(rng.sample(range(one.out_features), rng.randrange(1, one.out_features)))
        one.weight, one.out_features = nn.Parameter(one.weight[keep].clone()), len(keep)
        if one.bias is not None:
            one.bias = nn.Parameter(one.bias[keep].clone())
        two.weight, two.in_features = nn.Parameter(two.weight[:, keep].clone()), len(keep)
        return f"layer {number}: {len(keep)} hidden units kept"
    raise Inapplicable("no plain feed-forward")
