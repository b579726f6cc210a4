"""`make figures`: draw the figures of docs/figures. Maps and numbers in them are real: the default model, one sentence.

`layer.svg` is the picture of the README. architecture.svg is drawn by hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from normscope import Analysis, Analyzer, default_model
from normscope.decompose.activations import activation_slope, gate_coefficient
from normscope.engine.request import LayerShape, Options, estimate_cost, requests_for
from normscope.measures.amplification import amplification, shares

FOLDER = Path(__file__).parent / "figures"
SENTENCE = "The soap opera star Colin Fleming plays tennis in Barnsley."
LAYER = 2  # the third, where [CLS] draws two thirds of the attention
INK, GREY, PALE = "#1b2733", "#6b7785", "#e9edf1"
BLUE, ORANGE = "#12559c", "#c25e00"
STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "path",  # the same letters everywhere
    "svg.hashsalt": "normscope",
    "mathtext.fontset": "stix",
}
STEPS = [  # scope, component that it ends with, in words
    ("ATTN-W", "weights", "attention weights"),
    ("ATTN-N", "ATTN", "weights times\ntransformed vectors"),
    ("ATTNRES-N", "RES", "+ residual\nconnection"),
    ("ATTNRESLN-N", "LN", "+ layer\nnormalisation"),
    ("ATTNRESLNFF-N", "FF", "+ feed-forward"),
    ("ATTNRESLNFFRESLN-N", "RES LN", "+ its residual and\nnormalisation: the layer"),
]


def layer(result: Analysis) -> Figure:
    """One sentence at one layer, from the attention weights to the whole layer."""
    fig = plt.figure(figsize=(11.2, 3.3))
    side, gap, left, bottom = 0.1375, 0.0135, 0.078, 0.262
    height = side * fig.get_figwidth() / fig.get_figheight()
    drawn = None
    for n, (scope, component, words) in enumerate(STEPS):
        axes = fig.add_axes((left + n * (side + gap), bottom, side, height))
        part = shares(result[scope][LAYER]).numpy() * 100
        drawn = axes.imshow(part, cmap="cividis", norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
        axes.set_xticks(range(len(result.tokens)), result.tokens, rotation=90, fontsize=6)
        labels = result.tokens if n == 0 else [""] * len(result.tokens)
        axes.set_yticks(range(len(result.tokens)), labels, fontsize=6.5)
        axes.tick_params(length=0, pad=2)
        middle = left + n * (side + gap) + side / 2
        fig.text(middle, 0.935, component, ha="center", va="center", fontsize=10, weight="bold", bbox=_box(n))
        fig.text(middle, 0.815, words, ha="center", va="center", fontsize=7.2, color=GREY, linespacing=1.15)
        mixing = float(result.mixing_ratio(scope)[LAYER].mean())
        _bar(fig, middle - side / 2, 0.0, side, mixing)
        if n:
            _arrow(fig, middle - side - gap + 0.044, middle - 0.044, 0.935)
    fig.text(left - 0.006, 0.02, "from other\ntokens", ha="right", va="center", fontsize=7, color=GREY, linespacing=1.1)
    assert drawn is not None
    bar = fig.colorbar(drawn, cax=fig.add_axes((0.9875, bottom, 0.006, height)), ticks=[0, 5, 20, 50, 100])
    bar.ax.yaxis.set_ticks_position("left")
    bar.ax.set_yticklabels(["", "5", "20", "50", "%"], fontsize=6)
    bar.ax.tick_params(length=0, pad=1)
    bar.outline.set_linewidth(0)  # type: ignore[operator]
    fig.text(left - 0.062, bottom + height / 2, "output tokens", rotation=90, ha="center", va="center", fontsize=7.5)
    return fig


def _box(n: int) -> dict[str, Any]:
    colour = PALE if n else "#fbead9"
    return {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "none"}


def _arrow(fig: Figure, x0: float, x1: float, y: float) -> None:
    arrow = FancyArrowPatch(
        (x0, y), (x1, y), transform=fig.transFigure, arrowstyle="-|>", mutation_scale=8, color=GREY, lw=0.9
    )
    fig.add_artist(arrow)


def _bar(fig: Figure, x: float, y: float, width: float, share: float) -> None:
    axes = fig.add_axes((x, y, width, 0.042))
    axes.barh([0], [1], color=PALE, height=1)
    axes.barh([0], [share], color=ORANGE, height=1)
    axes.set(xlim=(0, 1), ylim=(-0.5, 0.5))
    axes.axis("off")
    inside = share > 0.3
    axes.text(
        share - 0.02 if inside else share + 0.02,
        0,
        f"{share:.0%}",
        ha="right" if inside else "left",
        va="center_baseline",
        fontsize=7.5,
        color="white" if inside else INK,
        weight="bold",
    )


def weights_and_norms(result: Analysis) -> Figure:
    """The attention of one head, its two factors and their product: a large weight on a short vector."""
    assert result.value_norms is not None
    weight = result.heads["ATTN-W"][LAYER]
    norm = result.heads["ATTN-N"][LAYER]
    gap = weight[:, :, 0] - shares(norm)[:, :, 0]  # where the weight of [CLS] says most that the norm does not
    head, row = divmod(int(gap[:, 1:-1].argmax()), len(result.tokens) - 2)
    row += 1
    length = result.value_norms[LAYER, head]
    parts = [
        (weight[head, row], r"weight $\alpha_{ij}$", BLUE),
        (length, r"vector $\Vert f(x_j)\Vert$", GREY),
        (norm[head, row], r"contribution $\Vert \alpha_{ij} f(x_j)\Vert$", ORANGE),
    ]
    fig, axes = plt.subplots(1, 3, figsize=(8.6, 2.75), sharey=True, layout="constrained")
    places = range(len(result.tokens))
    for ax, (values, title, colour) in zip(axes, parts, strict=True):
        ax.barh(places, values.numpy(), color=colour, height=0.72)
        ax.set_title(title, fontsize=10, color=colour if colour != GREY else INK)
        _bare(ax)
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
        ax.tick_params(axis="x", labelsize=6.5)
    axes[0].set_yticks(places, result.tokens)
    axes[0].invert_yaxis()
    fig.suptitle(
        f"head {head + 1} of layer {LAYER + 1}, to the output “{result.tokens[row]}”", fontsize=8.5, color=GREY
    )
    for ax, sign in ((axes[1], "×"), (axes[2], "=")):
        ax.text(-0.06, 0.5, sign, transform=ax.transAxes, fontsize=15, ha="center", va="center", color=GREY)
    return fig


def mixing_ratio() -> Figure:
    """The contributions to one output as arrows: own, the others, and the sum of the others."""
    fig, ax = plt.subplots(figsize=(7.6, 2.7))
    others = np.array([[0.55, 1.25], [1.15, -0.35], [0.3, -0.75]])
    sides = np.array([[-0.16, 0.02], [0.06, 0.12], [0.17, 0.04]])
    own = np.array([2.9, 1.15])
    place = np.zeros(2)
    for n, (part, side) in enumerate(zip(others, sides, strict=True)):
        _vector(ax, place, place + part, BLUE, 1.5)
        middle = place + part / 2 + side
        ax.text(*middle, rf"$c_{{i{n + 1}}}$", color=BLUE, fontsize=13, ha="center", va="center")
        place = place + part
    total = others.sum(0)
    _vector(ax, np.zeros(2), total, ORANGE, 2.8)
    _vector(ax, total, total + own, GREY, 2.8)
    ax.text(1.02, -0.22, r"$\sum_{j \neq i} c_{ij}$", color=ORANGE, fontsize=14, ha="center", va="center")
    ax.text(*(total + own / 2 + (-0.05, 0.2)), r"$c_{ii}$", color=GREY, fontsize=15, ha="center", va="center")
    mixed, kept = np.linalg.norm(total), np.linalg.norm(own)
    lengths = np.linalg.norm(others, axis=1).sum()
    text = f"{mixed:.1f} / ({mixed:.1f} + {kept:.1f}) = {mixed / (mixed + kept):.0%}"
    ax.text(3.35, 0.3, f"mixing ratio  {text}", fontsize=10, color=INK, va="center")
    other = f"lengths added up instead of vectors: {lengths / (lengths + kept):.0%}"
    ax.text(3.35, 0.02, other, fontsize=8.5, color=GREY, va="center")
    ax.set_aspect("equal")
    ax.set(xlim=(-0.3, 6.7), ylim=(-0.5, 1.6))
    ax.axis("off")
    return fig


def _vector(ax: Axes, start: Any, end: Any, colour: str, width: float) -> None:
    arrow = {"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=tuple(end), xytext=tuple(start), arrowprops=arrow)


def gate() -> Figure:
    """What integrated gradients make of an activation: the slope of the chord, not of the tangent."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 2.7), layout="constrained")
    g = torch.nn.functional.gelu
    x = torch.linspace(-3, 3, 241)
    at = torch.tensor([1.0])
    chord, tangent = (float(gate_coefficient(kind, "gelu", g, at)) for kind in ("ig", "tangent"))  # type: ignore[arg-type]
    left.plot(x, g(x), color=INK, lw=1.6)
    left.plot([0, 1], [0, float(g(at))], color=ORANGE, lw=2.4, solid_capstyle="round")
    left.plot([0.1, 2.1], [float(g(at)) + tangent * (t - 1) for t in (0.1, 2.1)], color=GREY, lw=1.1, ls=(0, (4, 2)))
    left.plot([1], [float(g(at))], "o", color=INK, ms=4)
    for text, at_line, at_text, colour in (
        (f"chord from 0: slope {chord:.2f}", (0.5, chord / 2), (-2.75, 1.05), ORANGE),
        (f"tangent at a = 1: slope {tangent:.2f}", (1.85, float(g(at)) + tangent * 0.85), (-2.75, 2.1), GREY),
    ):
        leader = {"arrowstyle": "-", "color": colour, "lw": 0.6}
        left.annotate(text, at_line, at_text, color=colour, fontsize=8, arrowprops=leader)
    left.set(xlabel="a", title="GELU", xlim=(-3, 3), ylim=(-0.4, 2.7))
    right.plot(x, gate_coefficient("ig", "gelu", g, x), color=ORANGE, lw=2, label=r"(g(a) − g(0)) / a = Φ(a)")
    right.plot(x, activation_slope(g, x), color=GREY, lw=1.1, ls=(0, (4, 2)), label="g'(a)")
    right.set(xlabel="a", title="What multiplies every summand of a", xlim=(-3, 3), ylim=(-0.2, 1.25))
    right.legend(frameon=False, fontsize=8, loc="upper left")
    for ax in (left, right):
        ax.axhline(0, color=GREY, lw=0.5)
        ax.axvline(0, color=GREY, lw=0.5)
        _bare(ax)
        ax.title.set_fontsize(9)
        ax.tick_params(labelsize=7)
    return fig


def amplified(result: Analysis) -> Figure:
    """What the feed-forward adds to each share, and takes from it."""
    change = amplification(result["ATTNRESLN-N"][LAYER], result["ATTNRESLNFF-N"][LAYER]).numpy() * 100
    np.fill_diagonal(change, math.nan)
    most = np.nanmax(np.abs(change))
    fig, ax = plt.subplots(figsize=(4.6, 4.0), layout="constrained")
    colours = matplotlib.colors.LinearSegmentedColormap.from_list("", ["#2b6cb0", "#ffffff", "#d9730d"])
    drawn = ax.imshow(change, cmap=colours.with_extremes(bad="#f0f0f0"), vmin=-most, vmax=most, interpolation="nearest")
    ax.set_xticks(range(len(result.tokens)), result.tokens, rotation=90, fontsize=7)
    ax.set_yticks(range(len(result.tokens)), result.tokens, fontsize=7)
    ax.tick_params(length=0, pad=2)
    ax.set_xlabel("input tokens j")
    ax.set_ylabel("output tokens i")
    bar = fig.colorbar(drawn, shrink=0.8, pad=0.02, label="change of the share, in points")
    bar.outline.set_linewidth(0)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=7, length=2)
    return fig


def memory(lens: Analyzer) -> Figure:
    """What contribution vectors would take if they were kept, against what normscope takes, by its own estimate."""
    shape = LayerShape(width=768, heads=12, hidden=3072)
    lengths = [int(n) for n in np.logspace(5, 12, 57, base=2)]
    attention = ["weights", "attention", "attention-residual", "attention-block"]
    curves = [([4 * shape.heads * n**2 * shape.width for n in lengths], "every vector of every head", GREY, (300, 30))]
    for scopes, label, colour, place in (
        (None, "normscope, all scopes", ORANGE, (220, 0.55)),
        (attention, "normscope, attention scopes", BLUE, (300, 0.027)),
    ):
        (request,) = requests_for(lens.loaded, Options(scopes=scopes, layers=[0]))
        taken = [estimate_cost([n], request, shape, torch.float32).memory for n in lengths]
        curves.append((taken, label, colour, place))
    fig, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    for values, label, colour, place in curves:
        ax.plot(lengths, [value / 1e9 for value in values], color=colour, lw=2)
        ax.text(*place, label, color=colour, fontsize=8, ha="right" if colour == GREY else "left")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set(xlabel="tokens", ylabel="GB for one layer", xlim=(32, 4096), ylim=(0.01, 1000))
    ax.set_xticks([32, 128, 512, 2048, 4096], ["32", "128", "512", "2048", "4096"])
    ax.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["0.01", "0.1", "1", "10", "100", "1000"])
    ax.minorticks_off()
    ax.grid(axis="y", color=PALE, lw=0.8)
    ax.set_axisbelow(True)
    _bare(ax)
    return fig


def _bare(ax: Axes) -> None:
    for edge in ("top", "right"):
        ax.spines[edge].set_visible(False)
    ax.tick_params(length=2)


DRAWINGS: dict[str, Callable[[Analyzer, Analysis], Figure]] = {
    "layer": lambda lens, result: layer(result),
    "weights-and-norms": lambda lens, result: weights_and_norms(result),
    "mixing-ratio": lambda lens, result: mixing_ratio(),
    "gate": lambda lens, result: gate(),
    "amplified": lambda lens, result: amplified(result),
    "memory": lambda lens, result: memory(lens),
}


def main(folder: Path = FOLDER) -> None:
    lens = Analyzer.from_pretrained(default_model.default_model_folder())
    result = lens.analyze(SENTENCE, heads=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in DRAWINGS.items():
            fig = draw(lens, result)
            fig.savefig(folder / f"{name}.svg", bbox_inches="tight", pad_inches=0.04, metadata={"Date": None})
            plt.close(fig)


if __name__ == "__main__":
    torch.set_num_threads(1)
    matplotlib.use("agg")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
