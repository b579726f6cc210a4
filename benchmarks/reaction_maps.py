"""Which map of a reaction model finds where the atoms went: weights or norms, one head or all, how large a scope.

`python -m benchmarks.reaction_maps FOLDER` reads RXNMapper's ALBERT (Schwaller et al., Science Advances 2021), whose
authors map atoms by the weights of one head: layer 11, head 6 (`rxnmapper.core`: layers [10], head 5, counted from 0).
Every reaction here is put together from pieces, so that the origin of each atom of the product is known. No group has
two atoms that chemistry cannot tell apart. A base and a solvent stand beside the reactants.

An atom of the product is mapped to the atom of the reactants with the same symbol that has the largest sum of both
directions of a map. The authors go on from there, with neighbours and a matching, which is left out. Layer and head are
chosen on half of the reactions; the accuracy is that on the other half.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from normscope import Analysis, Analyzer

ATOM = re.compile(r"\[[^\]]+]|Br|Cl|[NOSFICcnos]")
TOKEN = re.compile(rf"{ATOM.pattern}|>>|[()=#.0-9]")
PUBLISHED = (10, 5)  # layer and head, counted from 0
# Groups, with a place for the rest of their molecule between two parts.
LEFT = (("CCCCCC", ""), ("COCCOCC", ""), ("Clc1cccc(", ")c1"), ("CCOC(=O)CC", ""), ("Cc1cc(Br)nc(", ")c1"))
RIGHT = ("CCCCC", "CCOCCOC", "c1cccc(C)c1", "CC(=O)OCC", "Cc1cccc(OC)c1", "CCc1ccnc(Cl)c1")
BESIDE = "CCN(CC)CC.CN(C)C=O."  # a base and a solvent, none of whose atoms go into the product
# Kind -> the atoms of the left molecule that stay, those that leave, the atom that takes their place, and whether the
# molecule with that atom is written first.
KINDS = {
    "amide": ("C(=O)", "O", "N", False),
    "ester": ("C(=O)", "Cl", "O", True),
    "ether": ("C", "Br", "O", False),
    "amine": ("C", "Cl", "N", True),
    "sulfide": ("C", "I", "S", False),
}


@dataclass(frozen=True)
class Reaction:
    """A reaction as tokens, and for each atom of the product the position of the atom that it was."""

    tokens: tuple[str, ...]
    origins: Mapping[int, int]


def build_reaction(kind: str, left: tuple[str, str], right: str) -> Reaction:
    """Two molecules that become one."""
    stays, leaves, new, swapped = KINDS[kind]
    one = [("left", left[0]), ("stays", stays), ("leaves", leaves), ("end", left[1])]
    other = [("new", new), ("right", right)]
    reactants = [*other, ("", "."), *one] if swapped else [*one, ("", "."), *other]
    tokens, places = ["[CLS]"], dict[str, list[int]]()
    for name, piece in (("", BESIDE), *reactants, ("", ">>")):
        for token in TOKEN.findall(piece):
            if name and ATOM.fullmatch(token):
                places.setdefault(name, []).append(len(tokens))
            tokens.append(token)
    origins: dict[int, int] = {}
    product = [*one[:2], *other, one[3]] if left[1] else [*one[:2], *other]
    for name, piece in product:
        own = iter(places.get(name, ()))
        for token in TOKEN.findall(piece):
            if ATOM.fullmatch(token):
                origins[len(tokens)] = next(own)
            tokens.append(token)
    return Reaction((*tokens, "[SEP]"), origins)


def all_reactions() -> list[Reaction]:
    """Every kind of reaction of every two groups."""
    return [build_reaction(*one) for one in itertools.product(KINDS, LEFT, RIGHT)]


def found_atoms(maps: Tensor, reaction: Reaction) -> Tensor:
    """(...,): the share of the product's atoms that maps (..., rows, columns) trace to where they came from."""
    middle = reaction.tokens.index(">>")
    atoms = torch.tensor([n for n in range(middle) if ATOM.fullmatch(reaction.tokens[n])])
    hits = []
    for product, origin in reaction.origins.items():
        score = maps[..., product, atoms] + maps[..., atoms, product]
        same = torch.tensor([reaction.tokens[n] == reaction.tokens[product] for n in atoms.tolist()])
        hits.append(atoms[score.masked_fill(~same, -1.0).argmax(-1)] == origin)
    return torch.stack(hits).double().mean(0)


def maps_by_kind(result: Analysis) -> Iterator[tuple[str, Tensor]]:
    """The heads of the attention, (layers, heads, rows, columns), and the scopes, (layers, 1, rows, columns)."""
    for scope in ("ATTN-W", "ATTN-N"):
        yield f"{scope}, one head", result.heads[scope]
    for scope in result.scopes:
        yield scope, result[scope][:, None]


def measure_reactions(lens: Analyzer, vocabulary: Sequence[str], reactions: Sequence[Reaction]) -> dict[str, Tensor]:
    """Kind of map -> (reactions, layers, heads): the share of atoms found."""
    ids = {token: n for n, token in enumerate(vocabulary)}
    found: dict[str, list[Tensor]] = {}
    for one in reactions:
        result = lens.analyze({"input_ids": [ids[token] for token in one.tokens]}, heads=True)
        assert isinstance(result, Analysis)
        for name, maps in maps_by_kind(result):
            found.setdefault(name, []).append(found_atoms(maps, one))
    return {name: torch.stack(some) for name, some in found.items()}


def print_table(shares: Mapping[str, Tensor]) -> None:
    """The best layer (and head) of each kind of map on the even reactions, and its share on the odd ones."""
    published = shares["ATTN-W, one head"][1::2, PUBLISHED[0], PUBLISHED[1]].mean()
    print(f"{'published: ATTN-W, layer 11, head 6':38} {float(published):.3f}")
    for name, share in shares.items():
        best = int(share[::2].mean(0).argmax())
        layer, head = divmod(best, share.shape[2])
        place = f"layer {layer + 1}" + (f", head {head + 1}" if share.shape[2] > 1 else "")
        print(f"{f'{name}, {place}':38} {float(share[1::2, layer, head].mean()):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="folder with RXNMapper's config.json, model.safetensors and vocab.txt"
    )
    folder = parser.parse_args().folder
    lens = Analyzer(AutoModelForMaskedLM.from_pretrained(folder).eval())
    reactions = all_reactions()
    atoms = sum(len(one.origins) for one in reactions)
    print(f"{len(reactions)} reactions, {atoms} atoms in their products; every second reaction is for the choice")
    print_table(measure_reactions(lens, (folder / "vocab.txt").read_text("utf-8").split("\n"), reactions))


if __name__ == "__main__":
    main()
