"""The measurements and their bars."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import models
from benchmarks import products as bare
from benchmarks.memory import peak_of
from benchmarks.published import Published
from benchmarks.timing import Seconds, Task, best, interleaved
from normscope import Analyzer, derive
from normscope.decompose.kernels import multiply_packed_kernel, pack_kernel_matrix
from normscope.derivation.cache import forget_descriptions
from normscope.engine.request import default_budget
from normscope.models.registry import family_of
from normscope.models.scopes import scope_aliases, scope_names
from normscope.tracing import proof


def attention_names(model: PreTrainedModel) -> tuple[str, ...]:
    """The scopes of a layer up to the end of its attention block."""
    blocks = family_of(model).stacks[-1].blocks
    names = scope_names(blocks)
    return names[: names.index(scope_aliases(blocks)["attention-block"]) + 1]


@dataclass
class Row:
    """One line of the table. `value` is a ratio, or GB, ms or s (`unit`); a bar is an upper bound unless `at_least`."""

    what: str
    model: str
    shape: str
    value: float | None = None
    bar: float | None = None
    at_least: bool = False
    unit: str = "x"
    note: str = ""
    seconds: Seconds = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    neighbours: float | None = None  # share of the processors used by other work

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "skipped"
        if self.bar is None:
            return ""
        if self.at_least:
            return "ok" if self.value >= self.bar else "under"
        return "ok" if self.value <= self.bar else "over"


def attention_scopes(
    name: str, model: PreTrainedModel, batch: int, length: int, budget: float, bar: float | None = None
) -> Row:
    """Forward pass with all attention-block scopes, relative to the plain forward pass."""
    inputs = models.encoding(batch, length)
    lens = Analyzer(model)
    seconds = interleaved(
        {"forward": _forward(model, inputs), "scopes": _scopes(lens, inputs, attention_names(model))}, budget
    )
    times = best(seconds)
    return Row(
        "attention scopes / forward",
        name,
        _shape(model, batch, length),
        times["scopes"] / times["forward"],
        bar,
        seconds=seconds,
    )


def against_published(
    name: str,
    make: Callable[[], PreTrainedModel],
    batch: int,
    length: int,
    budget: float,
    bar: float | None = None,
    *,
    feed_forward: bool = False,
    heads: tuple[bool, bool] = (False, False),
) -> Row:
    """The published algorithm relative to normscope for the same scopes; both include the forward pass. Run it `fresh`.

    `heads`: whether each also makes head-level maps. The published code always does, normscope on request.
    """
    model = make()
    what = "published + naive FF / all scopes" if feed_forward else "published / attention scopes"
    note = {(True, True): "both with heads", (True, False): "published with heads"}.get(heads, "")
    row = Row(what, name, _shape(model, batch, length), bar=bar, at_least=True, note=note)
    config = model.config
    vectors = 4 * batch * length**2 * config.hidden_size
    needed = (
        vectors * (config.num_attention_heads + 5) + feed_forward * 8 * batch * length**2 * config.intermediate_size
    )
    if needed > default_budget():
        row.note = f"needs {needed / 1e9:.0f} GB of free memory"
        return row
    inputs = models.encoding(batch, length)
    baseline = Published(model, feed_forward=feed_forward, heads=heads[0])
    lens = Analyzer(model)
    ours = _scopes(lens, inputs, None if feed_forward else attention_names(model), heads=heads[1])
    row.seconds = interleaved({"published": lambda: baseline(inputs), "scopes": ours}, budget)
    times = best(row.seconds)
    row.value = times["published"] / times["scopes"]
    return row


def door(name: str, make: Callable[[], PreTrainedModel], budget: float) -> Row:
    """The verification of a model when an Analyzer is created, relative to its budget: two passes over 16 tokens or 2 %
    of the model's loading time, if that is more."""
    model = make()
    lens, forward = Analyzer(model), _forward(model, models.encoding(1, 16))

    def prove_again() -> None:
        proof.forget_proof(lens.loaded)
        proof.prove(lens.loaded)

    def two_passes() -> None:
        forward()
        forward()

    seconds = interleaved({"proof": prove_again, "two passes": two_passes, "load": make}, budget)
    times = best(seconds)
    return Row(
        "proof / allowed",
        name,
        "1 x 16, two passes",
        times["proof"] / max(times["two passes"], 0.02 * times["load"]),
        1.0,
        note=", ".join(f"{what} {1e3 * time:.1f} ms" for what, time in times.items()),
        seconds=seconds,
    )


def derivation(name: str, make: Callable[[], PreTrainedModel], budget: float) -> Row:
    """Seconds to describe a model by watching it and to prove the description, as `derive` does once for a type."""
    model = make()

    def derive_anew() -> None:
        forget_descriptions()
        derive(model)

    with patch.dict(os.environ, {"NORMSCOPE_CACHE": ""}):
        seconds = interleaved({"derive": derive_anew}, budget)
    return Row("derivation", name, "and its proof", best(seconds)["derive"], 2.0, unit="s", seconds=seconds)


def least_work(name: str, make: Callable[[], PreTrainedModel], length: int, budget: float) -> Row:
    """The published algorithm relative to the matrix products that the scopes cannot avoid: an upper bound on the
    speed-up. Run it `fresh`."""
    bare.verify()
    model = make()
    inputs = models.encoding(1, length)
    baseline, products, lens = Published(model), bare.Products(model, length), Analyzer(model)
    ours = _scopes(lens, inputs, attention_names(model))
    seconds = interleaved(
        {"published": lambda: baseline(inputs), "products": lambda: products(inputs), "scopes": ours}, budget
    )
    times = best(seconds)
    return Row(
        "published / products alone",
        name,
        _shape(model, 1, length),
        times["published"] / times["products"],
        note=f"attention scopes {times['published'] / times['scopes']:.2f}x for comparison",
        seconds=seconds,
    )


def feed_forward_floor(
    name: str,
    model: PreTrainedModel,
    layers: int,
    length: int,
    budget: float,
    bar: float | None = None,
    *,
    causal: bool = False,
    least: int = 3,
) -> Row:
    """The time that the FF scopes add, relative to one product of all n x n vectors (half of them if causal) with W_2
    at the rate of a plain product.

    The plain products are repeated until they have the same number of operations, so that the clock rate drops under
    load as much as it does for the FF scopes. The note also has the rate of products with a packed matrix, which the
    scopes use, and the ratio at that rate.
    """
    d, d_ff = model.config.hidden_size, model.config.intermediate_size
    block = 4096
    pairs = layers * length**2 / (2 if causal else 1)
    repeats = max(1, round(pairs / block))
    x, W, out = torch.randn(block, d_ff), torch.randn(d_ff, d), torch.empty(block, d)
    layout = pack_kernel_matrix(W, block)

    def products() -> None:
        for _ in range(repeats):
            torch.mm(x, W, out=out)

    def packed_products() -> None:
        with torch.inference_mode():
            for _ in range(repeats):
                multiply_packed_kernel(x, layout, out, add=False) if layout.is_mkldnn else torch.mm(x, layout, out=out)

    inputs = models.encoding(1, length)
    lens = Analyzer(model)
    chosen = range(layers)
    seconds = interleaved(
        {
            "attention": _scopes(lens, inputs, attention_names(model), chosen),
            "all": _scopes(lens, inputs, None, chosen),
            "products": products,
            "packed products": packed_products,
        },
        budget,
        least,
    )
    times = best(seconds)
    extra = (times["all"] - times["attention"]) * repeats * block / pairs
    plain, fast = (2e-9 * repeats * block * d * d_ff / times[name] for name in ("products", "packed products"))
    return Row(
        "FF scopes / floor",
        name,
        f"1 x {length}, {layers} layers",
        extra / times["products"],
        bar,
        note=f"{plain:.0f} Gflop/s; packed {fast:.0f}, at which {extra / times['packed products']:.2f}x",
        seconds=seconds,
    )


def extra_memory(
    name: str, shape: str, layers: int, length: int, bar: float, *, scopes: str = "all", without_maps: bool = False
) -> Row:
    """Peak memory of all (or the attention) scopes beyond that of the forward pass, each in a separate process."""
    peaks = {what: peak_of(what, shape, layers, length) for what in ("forward", scopes)}
    model = models.SHAPES[shape](1)
    count = len(scope_names(family_of(model).stacks[-1].blocks)) if scopes == "all" else len(attention_names(model))
    peaks["maps"] = 4 * count * layers * length**2
    extra = peaks[scopes] - peaks["forward"] - (peaks["maps"] if without_maps else 0)
    return Row(
        f"memory of {scopes} scopes - forward",
        name,
        f"1 x {length}, {layers} layers",
        extra / 1e9,
        bar,
        unit=" GB",
        note="maps not counted" if without_maps else "",
        bytes=peaks,
    )


def _forward(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Task:
    def run() -> None:
        with torch.inference_mode():
            model(**inputs)

    return run


def _scopes(
    lens: Analyzer,
    inputs: dict[str, Tensor],
    scopes: Sequence[str] | None,
    layers: Sequence[int] | None = None,
    heads: bool = False,
) -> Task:
    batch = len(inputs["input_ids"])
    return lambda: list(lens.stream(inputs, batch_size=batch, scopes=scopes, layers=layers, heads=heads))


def _shape(model: PreTrainedModel, batch: int, length: int) -> str:
    return f"{batch} x {length}, {model.config.num_hidden_layers} layers"
