"""Flows across layers: DecompX vectors against the published algorithm, their memory, and the backward pass from a
scalar target against a forward pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from benchmarks import models
from benchmarks.measures import Row
from benchmarks.memory import THREADS, peak
from benchmarks.timing import best, interleaved
from normscope import Analyzer

BASE = "BERT-base"


def classifier(layers: int, **sizes: Any) -> PreTrainedModel:
    """The shape of BERT-base with random weights and biases, and a head for two classes."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=models.VOCABULARY, num_hidden_layers=layers, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.02)
    model.set_attn_implementation("sdpa")
    model.eval()
    return model


class PublishedVectors:
    """DecompX as published (Modarressi et al. 2023, AbsDot, GELU frozen at g(a)/a): in each layer, the vectors of every
    head are made and weighted as tensors (heads, n, n, d); then every step runs on all n x n vectors at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.base: Any = model.base_model
        self.seen: dict[str, Tensor] = {}
        self.X: Tensor | None = None  # (n, n, d)
        self.norms: list[Tensor] = []

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """(n, n) norms after each layer."""
        self.X, self.norms = None, []
        handles = [handle for layer in self.base.encoder.layer for handle in self._watch(layer)]
        own = self.base.config._attn_implementation
        self.base.set_attn_implementation("eager")
        try:
            self.base(**inputs)
        finally:
            self.base.set_attn_implementation(own)
            for handle in handles:
                handle.remove()
        return self.norms

    def _watch(self, layer: Any) -> Iterator[Any]:
        def keep(name: str, module: nn.Module, *, before: bool = False, item: int | None = None) -> Any:
            def hook(_: nn.Module, given: tuple[Any, ...], made: Any) -> None:
                self.seen[name] = (given[0] if before else made if item is None else made[item])[0]

            return module.register_forward_hook(hook)

        def done(_: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            if self.X is None:
                self.X = torch.diag_embed(self.seen["input"].t()).permute(1, 2, 0)
            self.X = self._layer(layer, self.X)
            self.norms.append(self.X.norm(dim=-1))

        yield keep("input", layer.attention.self.value, before=True)
        yield keep("weights", layer.attention.self, item=1)
        yield keep("sum1", layer.attention.output.LayerNorm, before=True)
        yield keep("preactivation", layer.intermediate.dense)
        yield keep("activation", layer.intermediate)
        yield keep("sum2", layer.output.LayerNorm, before=True)
        yield layer.register_forward_hook(done)

    def _layer(self, layer: Any, X: Tensor) -> Tensor:
        alpha, value, output = self.seen["weights"], layer.attention.self.value, layer.attention.output
        heads, n, _ = alpha.shape
        d = X.shape[2]
        values = torch.einsum("jkd,vd->jkv", X, value.weight).view(n, n, heads, -1).permute(2, 0, 1, 3)
        per_head = output.dense.weight.view(d, heads, -1)
        transformed = torch.einsum("hjkv,dhv->hjkd", values, per_head)
        weighted = torch.einsum("hij,hjkd->hikd", alpha, transformed)
        sums = weighted.sum(0) + X
        del transformed, weighted
        sums = _split(output.dense.weight @ value.bias + output.dense.bias, sums)
        z = _normalised(sums, self.seen["sum1"], output.LayerNorm)
        hidden = _split(layer.intermediate.dense.bias, torch.einsum("ld,ikd->ikl", layer.intermediate.dense.weight, z))
        theta = self.seen["activation"] / (self.seen["preactivation"] + 1e-12)
        y = torch.einsum("ikl,dl->ikd", hidden * theta[:, None], layer.output.dense.weight)
        y = _split(layer.output.dense.bias, y)
        return _normalised(z + y, self.seen["sum2"], layer.output.LayerNorm)


def _split(bias: Tensor, X: Tensor) -> Tensor:
    weights = torch.einsum("ikd,d->ik", X, bias).abs()
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-12)
    return X + weights[..., None] @ bias[None]


def _normalised(X: Tensor, total: Tensor, norm: nn.LayerNorm) -> Tensor:
    variance = (total - total.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)[:, None]
    normed = torch.einsum("ikd,d->ikd", (X - X.mean(-1, keepdim=True)) / (variance + norm.eps) ** 0.5, norm.weight)
    return _split(norm.bias, normed)


def verify(tolerance: float = 1e-4) -> float:
    """The largest relative difference between the baseline and normscope on a small model; raises above `tolerance`."""
    model = classifier(3, hidden_size=48, num_attention_heads=4, intermediate_size=96)
    inputs = models.encoding(1, 12)
    theirs = torch.stack(PublishedVectors(model)(inputs))
    ours = Analyzer(model).flow(inputs, method="decompx").maps
    worst = float(((ours - theirs).abs() / theirs.amax(-1, keepdim=True)).max())
    if not worst <= tolerance:
        raise AssertionError(
            f"The baseline and normscope differ by {worst:.1e}: the measurements would be meaningless."
        )
    return worst


def vectors(layers: int, length: int, budget: float, bar: float | None = None) -> Row:
    """The published algorithm relative to normscope for the same vectors; both include the forward pass."""
    model, inputs = classifier(layers), models.encoding(1, length)
    baseline, lens = PublishedVectors(model), Analyzer(model)
    seconds = interleaved(
        {"published": lambda: baseline(inputs), "decompx": lambda: lens.flow(inputs, method="decompx").maps},
        budget,
        least=2,
    )
    times = best(seconds)
    return Row(
        "published / DecompX vectors",
        BASE,
        f"1 x {length}, {layers} layers",
        times["published"] / times["decompx"],
        bar,
        at_least=True,
        seconds=seconds,
    )


def memory(layers: int, length: int, bar: float | None = None) -> Row:
    """Peak memory of all DecompX vectors beyond that of the forward pass, each in a separate process."""
    peaks = {what: _peak(what, layers, length) for what in ("forward", "decompx")}
    return Row(
        "memory of DecompX vectors - forward",
        BASE,
        f"1 x {length}, {layers} layers",
        (peaks["decompx"] - peaks["forward"]) / 1e9,
        bar,
        unit=" GB",
        bytes=peaks,
    )


def target(layers: int, length: int, budget: float, bar: float | None = None) -> Row:
    """The scores of one logit by token at every layer, including freezing, relative to the plain forward pass."""
    model, inputs = classifier(layers), models.encoding(1, length)
    lens = Analyzer(model)

    def forward() -> None:
        with torch.inference_mode():
            model(**inputs)

    seconds = interleaved({"forward": forward, "flow": lambda: lens.flow(inputs, target=0).scores}, budget)
    times = best(seconds)
    return Row(
        "scores of a logit / forward",
        BASE,
        f"1 x {length}, {layers} layers",
        times["flow"] / times["forward"],
        bar,
        seconds=seconds,
    )


def rows() -> Iterator[Callable[[], Row]]:
    """Every measurement with its bar. All layers cost the same, so two give the same ratio as twelve."""
    print(f"The published algorithm of DecompX agrees with normscope to {verify():.1e}.")
    yield lambda: vectors(2, 128, 20, 1.6)
    yield lambda: memory(2, 256, 1.5)
    for length in (25, 128, 512):
        yield lambda n=length: target(12, n, 5, 5.0)  # type: ignore[misc]


def _peak(what: str, layers: int, length: int) -> int:
    command = [sys.executable, "-m", "benchmarks.flow", what, str(layers), str(length)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _measured(what: str, layers: int, length: int) -> int:
    model, inputs = classifier(layers), models.encoding(1, length)
    if what == "forward":
        with torch.inference_mode():
            model(**inputs)
    else:
        Analyzer(model).flow(inputs, method="decompx").maps  # noqa: B018  # computed on access
    return peak()


if __name__ == "__main__":  # runs in the process whose memory is measured
    torch.set_num_threads(THREADS)
    print(_measured(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
