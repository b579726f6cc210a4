"""Attacks on inputs: masks with holes, padding, positions, types, too long, in other forms."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.attacks.subject import Inapplicable, Subject, attack
from tests.helpers.tiny import CAUSAL

SIDES = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


def a_side(rng: random.Random, subject: Subject) -> str:
    sides = [key for key in SIDES if key in subject.encoding]
    if not sides:
        raise Inapplicable("no text")
    return rng.choice(sides)


def mask_of(subject: Subject, side: str) -> Tensor:
    return subject.encoding.setdefault(SIDES[side], torch.ones_like(subject.encoding[side]))


@attack(weight=2)
def mask_of_ones(rng: random.Random, subject: Subject) -> str:
    mask_of(subject, a_side(rng, subject))
    return "a mask of ones"


@attack(weight=2)
def holes(rng: random.Random, subject: Subject) -> str:
    """Tokens masked inside the text, at most two, so that a window of four has an unmasked one."""
    side = a_side(rng, subject)
    mask = mask_of(subject, side)
    if mask.shape[1] < 3:
        raise Inapplicable("too short")
    inside = rng.sample(range(1, mask.shape[1] - 1), min(rng.choice([1, 2]), mask.shape[1] - 2))
    mask[0, inside] = 0
    return f"{SIDES[side]} with holes at {sorted(inside)}"


@attack()
def random_mask(rng: random.Random, subject: Subject) -> str:
    """Any mask with no more than two masked tokens in a row."""
    side = a_side(rng, subject)
    mask = mask_of(subject, side)
    run = 0
    for n in range(mask.shape[1]):
        masked = run < 2 and rng.random() < 0.45
        run = run + 1 if masked else 0
        mask[0, n] = not masked
    return f"{SIDES[side]} {mask[0].tolist()}"


@attack(weight=2)
def padding(rng: random.Random, subject: Subject) -> str:
    side = a_side(rng, subject)
    mask_of(subject, side)
    left, right = rng.choice([(0, 2), (2, 0), (1, 1), (3, 0), (0, 3)])
    fill = rng.choice([0, 1, 7])
    for key, value in list(subject.encoding.items()):
        mine = key.startswith("decoder") == side.startswith("decoder")
        if isinstance(value, Tensor) and value.dim() == 2 and mine:
            with_ = 0 if not key.endswith("input_ids") else fill
            subject.encoding[key] = torch.nn.functional.pad(value, (left, right), value=with_)
    return f"{side} padded by {left} on the left and {right} on the right with {fill}"


@attack(weight=0.5)
def only_padding(rng: random.Random, subject: Subject) -> str:
    mask_of(subject, a_side(rng, subject)).zero_()
    return "everything masked"


@attack(weight=2.5)
def positions(rng: random.Random, subject: Subject) -> str:
    """position_ids: in order, from elsewhere, restarting (packed), repeated, at random, backwards."""
    if "input_ids" not in subject.encoding:
        raise Inapplicable("no text")
    n = subject.encoding["input_ids"].shape[1]
    kind = rng.choice(["in order", "from 5", "packed", "packed", "constant", "random", "backwards", "too far"])
    first = rng.randrange(1, n) if n > 1 else 1
    made = {
        "in order": list(range(n)),
        "from 5": list(range(5, 5 + n)),
        "packed": [*range(first), *range(n - first)],
        "constant": [2] * n,
        "random": [rng.randrange(20) for _ in range(n)],
        "backwards": list(reversed(range(n))),
        "too far": [*range(n - 1), 500],
    }[kind]
    subject.encoding["position_ids"] = torch.tensor([made])
    return f"positions {kind}"


@attack()
def token_types(rng: random.Random, subject: Subject) -> str:
    if "input_ids" not in subject.encoding:
        raise Inapplicable("no text")
    n = subject.encoding["input_ids"].shape[1]
    high = rng.choice([1, 2, 2, 2, 4])
    subject.encoding["token_type_ids"] = torch.tensor([[rng.randrange(high) for _ in range(n)]])
    return f"token types below {high}"


@attack()
def long(rng: random.Random, subject: Subject) -> str:
    """Longer than the model's number of positions, if it has one."""
    side = a_side(rng, subject)
    length = rng.choice([39, 40, 41, 43])
    for key in [key for key in subject.encoding if key.startswith("decoder") == side.startswith("decoder")]:
        if key != side and isinstance(subject.encoding[key], Tensor) and subject.encoding[key].dim() == 2:
            del subject.encoding[key]
    subject.encoding[side] = torch.tensor([[rng.randrange(3, 50) for _ in range(length)]])
    return f"{side} of {length} tokens"


@attack(weight=0.7)
def one_token(rng: random.Random, subject: Subject) -> str:
    side = a_side(rng, subject)
    for key, value in list(subject.encoding.items()):
        if isinstance(value, Tensor) and value.dim() == 2 and key.startswith("decoder") == side.startswith("decoder"):
            subject.encoding[key] = value[:, :1].clone()
    return f"{side} of one token"


@attack()
def special_ids(rng: random.Random, subject: Subject) -> str:
    """Padding, end and unknown ids in the middle; ids beyond the vocabulary."""
    side = a_side(rng, subject)
    ids = subject.encoding[side].clone()
    number = rng.choice([0, 0, 1, 1, 2, 2, 49, 50, -1])
    ids[0, rng.randrange(ids.shape[1])] = number
    subject.encoding[side] = ids
    return f"{side} with {number}"


@attack()
def forms(rng: random.Random, subject: Subject) -> str:
    """Masks as booleans or floating point, ids as int32, a view of a larger tensor."""
    side = a_side(rng, subject)
    kind = rng.choice(["bool", "float", "int32", "view"])
    if kind in ("bool", "float"):
        subject.encoding[SIDES[side]] = mask_of(subject, side).to(torch.bool if kind == "bool" else torch.float32)
    elif kind == "int32":
        subject.encoding[side] = subject.encoding[side].int()
    else:
        wide = torch.zeros(1, 2 * subject.encoding[side].shape[1], dtype=torch.long)
        wide[:, ::2] = subject.encoding[side]
        subject.encoding[side] = wide[:, ::2]
    return f"{side} as {kind}"


@attack(weight=0.7)
def strange_keys(rng: random.Random, subject: Subject) -> str:
    """Arguments that change what the model does, or that it does not have."""
    n = subject.encoding["input_ids"].shape[1] if "input_ids" in subject.encoding else 4
    key, value = rng.choice(
        [
            ("output_attentions", True),
            ("use_cache", True),
            ("return_dict", False),
            ("labels", torch.ones(1, n, dtype=torch.long)),
            ("inputs_embeds", torch.zeros(1, n, 24, dtype=subject.dtype)),
            ("attention_mask", torch.ones(1, 1, n, n, dtype=torch.bool).tril()),
            ("head_mask", torch.zeros(4)),
            ("cache_position", torch.arange(n)),
            ("nonsense", 1),
        ]
    )
    subject.encoding[key] = value
    return f"{key} in the encoding"


@attack(weight=0.5)
def token_types_for_causal(rng: random.Random, subject: Subject) -> str:
    """GPT-2 adds the embedding of a type as if it were a word."""
    if subject.name not in CAUSAL:
        raise Inapplicable("no causal model")
    return token_types(rng, subject)


def without_padding(encoding: Mapping[str, Any]) -> dict[str, Any]:
    """The same input as the documentation defines it: without labels, and without padding that a mask marks at the
    ends."""
    made = {key: value for key, value in encoding.items() if key != "labels"}
    for side, mask_key in SIDES.items():
        mask = encoding.get(mask_key)
        ids = encoding.get(side)
        if mask is None or ids is None or mask.shape != ids.shape or not bool(mask.any()):
            continue
        real = mask[0].nonzero().flatten()
        span = slice(int(real[0]), int(real[-1]) + 1)
        for key, value in encoding.items():
            if (
                isinstance(value, Tensor)
                and value.shape == ids.shape
                and key.startswith("decoder") == side.startswith("decoder")
            ):
                made[key] = value[:, span]
    return made
