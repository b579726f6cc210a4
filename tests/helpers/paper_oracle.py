"""The papers' main numbers for a BERT, from its weights alone: NumPy in float64, every contribution vector written out.

Obviously right, not fast. It shares no code with the library, not even the forward pass. The keys are those of a
report's `numbers.csv`.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
METHODS = ("ATTN-W", "ATTN-N", "ATTNRES-W", "ATTNRES-N", "ATTNRESLN-N")  # EMNLP 2021
CHAIN = ("ATTN-W", "ATTN-N", "ATTNRES-N", "ATTNRESLN-N", "ATTNRESLNFF-N", "ATTNRESLNFFRES-N", "ATTNRESLNFFRESLN-N")


@dataclass(frozen=True)
class NaiveBert:
    """The weights of a BERT encoder by their names in transformers, without the prefix of a model with a head."""

    weights: Mapping[str, Array]
    layers: int
    heads: int
    epsilon: float


@dataclass(frozen=True)
class NaiveLayer:
    """One layer for one sequence of n tokens."""

    alpha: Array  # (heads, n, n)
    inputs: Array  # (n, d): x
    transformed: Array  # (heads, n, d): f(x)
    contributions: Mapping[str, Array]  # scope -> (n, n, d); of the scopes of weights (n, n, 1)
    bypass: Array  # (n, d): input of the feed-forward, to which its output is added
    ff: Array  # (n, d): output of the feed-forward
    output: Array  # (n, d)
    gains: Array  # (d,): of the last norm

    def map(self, scope: str) -> Array:
        return np.linalg.norm(self.contributions[scope], axis=-1)


def naive_layers(bert: NaiveBert, ids: Sequence[int], uniform: Sequence[int] = ()) -> list[NaiveLayer]:
    """A forward pass; attention is uniform in the layers `uniform`."""
    table = bert.weights
    x = table["embeddings.word_embeddings.weight"][list(ids)]
    x = (
        x
        + table["embeddings.position_embeddings.weight"][: len(ids)]
        + table["embeddings.token_type_embeddings.weight"][0]
    )
    gain, shift = (table[f"embeddings.LayerNorm.{name}"] for name in ("weight", "bias"))
    x = (x - x.mean(-1, keepdims=True)) / spread(x, bert.epsilon) * gain + shift
    found = []
    for n in range(bert.layers):
        weights = {key.removeprefix(f"encoder.layer.{n}."): value for key, value in table.items()}
        found.append(naive_layer(weights, x, bert.heads, bert.epsilon, n in uniform))
        x = found[-1].output
    return found


def naive_layer(weights: Mapping[str, Array], x: Array, heads: int, epsilon: float, uniform: bool) -> NaiveLayer:
    def linear(name: str, given: Array, bias: bool = True) -> Array:
        return given @ weights[f"{name}.weight"].T + (weights[f"{name}.bias"] if bias else 0)

    def norm(name: str, whole: Array, parts: Array) -> tuple[Array, Array]:
        """The norm of the whole vectors (n, d), and what it makes of their parts (n, n, d)."""
        gain, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        scale = spread(whole, epsilon)
        centred = (whole - whole.mean(-1, keepdims=True)) / scale * gain + shift
        return centred, (parts - parts.mean(-1, keepdims=True)) / scale[:, None] * gain

    n, width = x.shape
    size = width // heads
    q, k, v = (linear(f"attention.self.{name}", x) for name in ("query", "key", "value"))
    alpha, transformed = [], []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[:, part] @ k[:, part].T / math.sqrt(size)
        scores = np.zeros_like(scores) if uniform else scores - scores.max(-1, keepdims=True)
        alpha.append(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))
        transformed.append(v[:, part] @ weights["attention.output.dense.weight"][:, part].T)
    a, f, own = np.array(alpha), np.array(transformed), np.eye(n)[:, :, None]
    found: dict[str, Array] = {"ATTN-W": a.mean(0)[:, :, None]}
    found["ATTNRES-W"] = (found["ATTN-W"] + own) / 2
    found["ATTN-N"] = np.einsum("hij,hjd->ijd", a, f)
    found["ATTNRES-N"] = found["ATTN-N"] + own * x
    whole = x + found["ATTN-N"].sum(1) + weights["attention.output.dense.bias"]
    bypass, found["ATTNRESLN-N"] = norm("attention.output.LayerNorm", whole, found["ATTNRES-N"])
    # Integrated gradients from zero: the mean slope of the activation between 0 and h, which is GELU(h) / h = Phi(h).
    hidden = linear("intermediate.dense", bypass)
    slope = normal_distribution(hidden)
    gated = linear("intermediate.dense", found["ATTNRESLN-N"], bias=False) * slope[:, None]
    found["ATTNRESLNFF-N"] = linear("output.dense", gated, bias=False)
    found["ATTNRESLNFFRES-N"] = found["ATTNRESLNFF-N"] + found["ATTNRESLN-N"]
    ff = linear("output.dense", hidden * slope)
    output, found["ATTNRESLNFFRESLN-N"] = norm("output.LayerNorm", bypass + ff, found["ATTNRESLNFFRES-N"])
    return NaiveLayer(a, x, f, found, bypass, ff, output, weights["output.LayerNorm.weight"])


def spread(x: Array, epsilon: float) -> Array:
    return np.sqrt(x.var(-1, keepdims=True) + epsilon)


def normal_distribution(x: Array) -> Array:
    return (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def ranks_of(values: Any) -> Array:
    """1, 2, ...; ties have the mean of their ranks."""
    given = np.asarray(values, dtype=float).ravel()
    ordered = np.sort(given)
    return (np.searchsorted(ordered, given, "left") + np.searchsorted(ordered, given, "right") + 1) / 2


def spearman_of(a: Any, b: Any) -> float:
    return float(np.corrcoef(ranks_of(a), ranks_of(b))[0, 1])


def six_digits(values: Array) -> Array:
    scale = 10.0 ** (5 - np.floor(np.log10(values)))
    rounded: Array = np.round(values * scale) / scale
    return rounded


def frequency_ranks_of(ids: Sequence[int]) -> list[int]:
    """1 + the number of more frequent types."""
    counts = Counter(ids)
    return [1 + sum(other > counts[id] for other in counts.values()) for id in ids]


def mask_as_authors(sequences: Sequence[Sequence[int]], mask: int) -> list[list[int]]:
    """12 % of the tokens between [CLS] and [SEP], from one generator for the corpus."""
    generator = random.Random(0)
    masked = []
    for ids in sequences:
        n = len(ids) - 2
        chosen = set(generator.sample(range(1, n + 1), max(1, int(n * 0.12))))
        masked.append([mask if place in chosen else id for place, id in enumerate(ids)])
    return masked


def kinds_of(ids: Sequence[int], mask: int) -> list[str]:
    """The kind of each token of "[CLS] ... [SEP]" without punctuation."""
    inner = ["mask" if id == mask else "other" for id in ids[1:-1]]
    return ["first", *inner, "separator"]


def emnlp2020_numbers(bert: NaiveBert, sequences: Sequence[Sequence[int]]) -> dict[str, float]:
    """Table 1, Fig. 3, Table 2 and the correlations with frequency ranks, of texts without punctuation."""
    runs = [naive_layers(bert, ids) for ids in sequences]
    found: dict[str, float] = {}
    spreads: dict[str, list[float]] = defaultdict(list)
    for n in range(bert.layers):
        x = np.concatenate([np.linalg.norm(run[n].inputs, axis=-1) for run in runs])
        for key, value in {"mean": x.mean(), "sd": x.std(), "cv": x.std() / x.mean()}.items():
            found[f"dispersion.x.{key}.L{n + 1}"] = value
        for h in range(bert.heads):
            f = np.concatenate([np.linalg.norm(run[n].transformed[h], axis=-1) for run in runs])
            middle = {"mean": f.mean(), "sd": f.std(), "cv": f.std() / f.mean()}
            for key, value in {**middle, "max": f.max(), "min": f.min()}.items():
                found[f"dispersion.L{n + 1}H{h + 1}.{key}"] = value
            for key, value in middle.items():
                spreads[key].append(value)
    found |= {f"dispersion.{key}": float(np.mean(values)) for key, values in spreads.items()}
    for kind in ("first", "separator", "other"):
        pairs: tuple[list[Array], list[Array]] = ([], [])
        for n in range(bert.layers):
            weights, norms = [], []
            for ids, run in zip(sequences, runs, strict=True):
                chosen = [place for place, name in enumerate(kinds_of(ids, -1)) if name == kind]
                f = np.linalg.norm(run[n].transformed, axis=-1)  # (heads, n)
                alpha = run[n].alpha
                weights.append(alpha[:, :, chosen].mean((0, 1)).sum())
                norms.append((alpha * f[:, None])[:, :, chosen].mean((0, 1)).sum())
                pairs[0].append(alpha[:, :, chosen].ravel())
                pairs[1].append(np.broadcast_to(f[:, None], alpha.shape)[:, :, chosen].ravel())
            found[f"share.weight.{kind}.L{n + 1}"] = float(np.mean(weights))
            found[f"share.norm.{kind}.L{n + 1}"] = float(np.mean(norms))
        alpha, f = map(np.concatenate, pairs)
        # Equal inputs have equal norms, but for their rounding.
        found[f"spearman.{kind}"] = spearman_of(six_digits(alpha), six_digits(f))
        found[f"pairs.{kind}"] = len(alpha)
    ranks = frequency_ranks_of([id for ids in sequences for id in ids])
    norm = [np.mean([np.linalg.norm(one.transformed, axis=-1).mean(0) for one in run], axis=0) for run in runs]
    weight = [np.mean([one.alpha.mean((0, 1)) for one in run], axis=0) for run in runs]
    found["frequency.norm"] = spearman_of(np.concatenate(norm), ranks)
    found["frequency.weight"] = spearman_of(np.concatenate(weight), ranks)
    return found


def mixing_ratios(layer: NaiveLayer, method: str) -> Array:
    """(n,): how much of a token's new vector comes from the others, in percent."""
    parts = layer.contributions[method]
    own = np.linalg.norm(np.diagonal(parts).T, axis=-1)
    others = np.linalg.norm(parts.sum(1) - np.diagonal(parts).T, axis=-1)
    return 100 * others / (others + own)


def emnlp2021_numbers(bert: NaiveBert, sequences: Sequence[Sequence[int]], mask: int) -> dict[str, float]:
    """Table 2, Fig. 3, depth, frequency, Table 8, and uniform attention, with the masks of the authors' code."""
    masked = mask_as_authors(sequences, mask)
    runs, plain = [naive_layers(bert, ids) for ids in masked], [naive_layers(bert, ids) for ids in sequences]
    found: dict[str, float] = {}
    overall: dict[str, list[float]] = {}
    ranks = np.array(frequency_ranks_of([id for ids in sequences for id in ids]))
    words = np.array([kind == "other" for ids in sequences for kind in kinds_of(ids, -1)])
    for method in METHODS:
        ratios = [[mixing_ratios(layer, method) for layer in run] for run in runs]
        pooled = np.concatenate([row for some in ratios for row in some])
        found |= {f"mixing.{method}.{key}": getattr(pooled, key)() for key in ("mean", "max", "min")}
        diagonals = []
        for n in range(bert.layers):
            means = defaultdict(list)
            for ids, some in zip(masked, ratios, strict=True):
                kinds = np.array(kinds_of(ids, mask))
                for kind in ("first", "separator", "mask", "other"):
                    if (kinds == kind).any():
                        means[kind].append(some[n][kinds == kind].mean())
                means["overall"].append(some[n].mean())
            found |= {f"mixing.{method}.L{n + 1}.{kind}": float(np.mean(values)) for kind, values in means.items()}
            maps = [run[n].map(method) for run in runs]
            diagonals.append(np.mean([(np.diag(m) / m.sum(1)).mean() for m in maps]))
            found[f"diagonal.{method}.L{n + 1}"] = 100 * diagonals[-1]
        found[f"diagonal.{method}"] = 100 * float(np.mean(diagonals))
        overall[method] = [found[f"mixing.{method}.L{n + 1}.overall"] for n in range(bert.layers)]
        found[f"depth.{method}"] = spearman_of(overall[method], range(bert.layers))
        tokens = np.concatenate([np.mean([mixing_ratios(layer, method) for layer in run], axis=0) for run in plain])
        found[f"frequency.{method}.all"] = spearman_of(tokens, ranks)
        found[f"frequency.{method}.words"] = spearman_of(tokens[words], ranks[words])
    for n in (*range(bert.layers), -1):
        changed = range(bert.layers) if n < 0 else [n]
        far, turned = [], []
        for ids, run in zip(masked, runs, strict=True):
            y, z = run[-1].output, naive_layers(bert, ids, changed)[-1].output
            lengths = np.linalg.norm(y, axis=-1), np.linalg.norm(z, axis=-1)
            far.append((np.linalg.norm(z - y, axis=-1) / lengths[0]).mean())
            turned.append((1 - (y * z).sum(-1) / lengths[0] / lengths[1]).mean())
        name = "all" if n < 0 else f"L{n + 1}"
        found[f"uniform.relative.{name}"], found[f"uniform.cosine.{name}"] = 100 * np.mean(far), np.mean(turned)
    changes = [found[f"uniform.relative.L{n + 1}"] for n in range(bert.layers)]
    for method in ("ATTN-W", "ATTNRESLN-N"):
        found[f"uniform.spearman.{method}"] = spearman_of(overall[method], changes)
        found[f"uniform.pearson.{method}"] = np.corrcoef(overall[method], changes)[0, 1]
    return {key: float(value) for key, value in (found | expansion_numbers(bert)).items()}


def expansion_numbers(bert: NaiveBert) -> dict[str, float]:
    """||M||_F / sqrt(d + 1), with the paper's matrix M on [x, 1] and with that of its code."""
    rates: dict[str, list[float]] = {"paper": [], "code": []}
    for n in range(bert.layers):
        place = f"encoder.layer.{n}.attention"
        V, b_V = bert.weights[f"{place}.self.value.weight"].T, bert.weights[f"{place}.self.value.bias"]
        out, b_O = bert.weights[f"{place}.output.dense.weight"].T, bert.weights[f"{place}.output.dense.bias"]
        d = len(V)
        paper = np.block([[V @ out, np.zeros((d, 1))], [(b_V @ out + b_O)[None], np.ones((1, 1))]])
        code = np.block([[V @ out, (V @ b_O)[:, None]], [(b_V @ out)[None], np.full((1, 1), b_V @ b_O + 1)]])
        rates["paper"].append(np.linalg.norm(paper) / math.sqrt(d + 1))
        rates["code"].append(np.linalg.norm(code) / math.sqrt(d + 1))
    found = {f"expansion.{name}.L{n}": rate for name, some in rates.items() for n, rate in enumerate(some, 1)}
    return found | {
        f"expansion.{name}.{key}": getattr(np, key)(some)
        for name, some in rates.items()
        for key in ("mean", "min", "max")
    }


def ff_numbers(bert: NaiveBert, sequences: Sequence[Sequence[int]]) -> dict[str, float]:
    """Table 1, Fig. 9, 10, 11 and 12, of unmasked texts."""
    runs = [naive_layers(bert, ids) for ids in sequences]
    found: dict[str, float] = {}
    by_layer: dict[tuple[str, str], list[float]] = {}
    for place, a in enumerate(CHAIN):
        for b in CHAIN[place + 1 :]:
            by_layer[a, b] = [
                float(np.mean([spearman_of(run[n].map(a), run[n].map(b)) for run in runs])) for n in range(bert.layers)
            ]
            found[f"pair.{a}.{b}"] = float(np.mean(by_layer[a, b]))
    components = ("ATTN", "RES1", "LN1", "FF", "RES2", "LN2")
    changes = {name: by_layer[pair] for name, pair in zip(components, pairwise(CHAIN), strict=True)}
    changes["whole-block"] = by_layer["ATTNRESLN-N", "ATTNRESLNFFRESLN-N"]
    for (_, scope), values in zip(pairwise(CHAIN), changes.values(), strict=False):
        found |= {f"similarity.{scope}": np.mean(values), f"similarity.{scope}.min": min(values)}
        found |= {f"similarity.{scope}.max": max(values)}
        found |= {f"similarity.{scope}.L{n}": value for n, value in enumerate(values, 1)}
    for name, values in changes.items():
        found[f"change.{name}"] = 1 - np.mean(values)
        found |= {f"change.{name}.L{n}": 1 - value for n, value in enumerate(values, 1)}
    for scope in CHAIN[4:]:
        found |= {f"before.{scope}.L{n}": value for n, value in enumerate(by_layer["ATTNRESLN-N", scope], 1)}
    for n in range(bert.layers):
        ff, bypass = (np.concatenate([getattr(run[n], name) for run in runs]) for name in ("ff", "bypass"))
        norms = [np.linalg.norm(vectors, axis=-1).mean() for vectors in (ff, bypass)]
        found |= {f"norm.{name}.L{n + 1}": value for name, value in zip(("ff", "bypass"), norms, strict=True)}
        found[f"norm.ratio.L{n + 1}"] = norms[0] / norms[1]
        gains = runs[0][n].gains
        kept = np.argsort(gains, kind="stable")[max(1, len(gains) // 100) :]
        rest = [np.linalg.norm(run[n].contributions["ATTNRESLNFF-N"][..., kept], axis=-1) for run in runs]
        similar = [spearman_of(run[n].map("ATTNRESLN-N"), some) for run, some in zip(runs, rest, strict=True)]
        found[f"removed.L{n + 1}"] = np.mean(similar)
        found[f"removed.change.L{n + 1}"] = np.mean(similar) - by_layer["ATTNRESLN-N", "ATTNRESLNFF-N"][n]
        found[f"gain.L{n + 1}"] = spearman_of(np.abs(ff).mean(0), gains)
    return {key: float(value) for key, value in found.items()}


def mean_ff_amp(bert: NaiveBert, sequences: Sequence[Sequence[int]]) -> list[dict[tuple[int, int], float]]:
    """For each layer: (input type, output type) -> mean FF-amp over their occurrences at two different positions."""
    runs = [naive_layers(bert, ids) for ids in sequences]
    found = []
    for n in range(bert.layers):
        amps = defaultdict(list)
        for ids, run in zip(sequences, runs, strict=True):
            before, after = (run[n].map(scope) for scope in ("ATTNRESLN-N", "ATTNRESLNFF-N"))
            amp = after / after.sum(1, keepdims=True) - before / before.sum(1, keepdims=True)
            for i, output in enumerate(ids):
                for j, given in enumerate(ids):
                    if i != j:
                        amps[given, output].append(amp[i, j])
        found.append({pair: float(np.mean(values)) for pair, values in amps.items()})
    return found
