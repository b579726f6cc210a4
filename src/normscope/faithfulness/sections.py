"""The sections of the report: AOPC, accuracy without the top tokens, curves, and agreement of the methods."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from normscope.faithfulness import results
from normscope.faithfulness.measuring import SHARES
from normscope.faithfulness.results import DECOMPX, Results
from normscope.faithfulness.scoring import GRADIENT, LEAVE_ONE_OUT, RANDOM
from normscope.papers import charts
from normscope.papers.report import Cell, Picture, Section, Table

SHOWN = 4  # methods drawn in a chart of curves, beside the references
NAMES = {"mask": "masking", "delete": "deletion"}
PLACES = ".3f"


def aopc(found: Results, erasures: Sequence[str]) -> Section:
    """Comprehensiveness and sufficiency of every method."""
    tables, numbers = [], {}
    order = results.best_first(found, erasures[0])
    bars: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for erasure in erasures:
        rows = []
        for name in order:
            one = found.methods[name]
            comp, suff = (results.mean(one, of(one, erasure)) for of in _SIDES)
            eraser = [results.mean(one, of(one, erasure, results.ERASER)).mean for of in _SIDES]
            lead = results.lead(one, found.methods[RANDOM], results.of(erasure))
            beyond = (None, None, None, None) if name == RANDOM else (lead.mean, lead.low, lead.high, lead.p)
            sides = (comp.mean, comp.low, comp.high, suff.mean, suff.low, suff.high)
            rows.append((name, *sides, *eraser, *beyond, len(one.contexts)))
            numbers[f"comprehensiveness.{erasure}.{name}"] = comp.mean
            numbers[f"sufficiency.{erasure}.{name}"] = suff.mean
            bars.setdefault(NAMES[erasure], []).append(comp.mean)
            errors.setdefault(NAMES[erasure], []).append((comp.high - comp.low) / 2)
        columns = (
            *("method", "comp.", "comp. from", "comp. to", "suff.", "suff. from", "suff. to"),
            *("comp. (ERASER)", "suff. (ERASER)", "above random", "above from", "above to", "p", "contexts"),
        )
        tables.append(
            Table(
                f"aopc-{erasure}",
                f"AOPC by {NAMES[erasure]}",
                columns,
                tuple(rows),
                dict.fromkeys(columns[1:-2], PLACES) | {"p": ".4f"},
            )
        )
    picture = Picture(
        "aopc",
        "Comprehensiveness",
        charts.bars_with_errors(bars, x=order, xlabel="", ylabel="AOPC", errors=errors),
        "Bars: 95 % bootstrap intervals over entries.",
    )
    return Section("aopc", "Comprehensiveness and sufficiency", _AOPC, (picture, *tables), (), numbers)


def accuracy(found: Results, erasures: Sequence[str]) -> Section:
    """What is left of the model's choice, and of its accuracy, without the top tokens."""
    parts: list[Table | Picture] = []
    numbers = {}
    percents = tuple(f"{100 * share:.0f} %" for share in DECOMPX)
    kinds = [("choice", "The model's choice that stays")]
    if found.labelled:
        kinds.append(("given", "Accuracy that stays"))
    for erasure in erasures:
        order = results.best_first(found, erasure)
        for kind, title in kinds:
            rows: list[tuple[Cell, ...]] = []
            for name in order:
                one = found.methods[name]
                right = one.choice if kind == "choice" else one.given
                values = results.kept(one, erasure, right)
                each = [results.mean(one, values[:, k]).mean for k in range(len(DECOMPX))]
                whole = results.mean(one, values.mean(1))
                rows.append((name, *each, whole.mean, whole.low, whole.high))
                numbers[f"{'kept' if kind == 'choice' else 'accuracy'}.{erasure}.{name}"] = whole.mean
            columns = ("method", *percents, "mean", "from", "to")
            parts.append(
                Table(
                    f"{'kept' if kind == 'choice' else 'accuracy'}-{erasure}",
                    f"{title} without the top tokens, by {NAMES[erasure]}",
                    columns,
                    tuple(rows),
                    dict.fromkeys(columns[1:], PLACES),
                )
            )
        series = {
            name: [
                float(value) for value in results.kept(found.methods[name], erasure, found.methods[name].choice).mean(0)
            ]
            for name in _drawn(found, erasure)
        }
        parts.append(
            Picture(
                f"kept-{erasure}-curve",
                f"The model's choice that stays, by {NAMES[erasure]}",
                charts.line_chart(
                    series,
                    x=DECOMPX,
                    xlabel="share of the tokens taken away, those of the highest scores first",
                    ylabel="share of contexts",
                    ylim=(0, 1),
                ),
            )
        )
    return Section("accuracy", "Accuracy without the top tokens", _ACCURACY, tuple(parts), (), numbers)


def curves(found: Results, erasures: Sequence[str]) -> Section:
    """Deletion and insertion curves with the areas under them."""
    parts: list[Table | Picture] = []
    numbers = {}
    for erasure in erasures:
        rows = []
        for name in results.best_first(found, erasure):
            one = found.methods[name]
            low = results.mean(one, results.deletion(one, erasure))
            high = results.mean(one, results.insertion(one, erasure))
            rows.append((name, low.mean, low.low, low.high, high.mean, high.low, high.high))
            numbers[f"deletion.{erasure}.{name}"], numbers[f"insertion.{erasure}.{name}"] = low.mean, high.mean
        columns = ("method", "deletion", "del. from", "del. to", "insertion", "ins. from", "ins. to")
        parts.append(
            Table(
                f"areas-{erasure}",
                f"Areas under the curves, by {NAMES[erasure]}",
                columns,
                tuple(rows),
                dict.fromkeys(columns[1:], PLACES),
            )
        )
        for kind, title, xlabel in (
            ("without", "Deletion", "share of the tokens taken away, those of the highest scores first"),
            ("only", "Insertion", "share of the tokens present, those of the highest scores first"),
        ):
            series = {
                name: [float(value) for value in np.mean(found.methods[name].after[erasure, kind], axis=0)]
                for name in _drawn(found, erasure)
            }
            figure = charts.line_chart(series, x=SHARES, xlabel=xlabel, ylabel="probability of the target")
            parts.append(Picture(f"{title.lower()}-{erasure}", f"{title} curves, by {NAMES[erasure]}", figure))
    return Section("curves", "Deletion and insertion curves", _CURVES, tuple(parts), (), numbers)


def agreement(found: Results) -> Section | None:
    """Rank correlations with gradient x input and leave-one-out; None where the run has neither."""
    others = [name for name in (GRADIENT, LEAVE_ONE_OUT) if name in found.methods]
    if not others:
        return None
    rows, numbers = [], {}
    for name, one in found.methods.items():
        cells: list[float | None] = []
        for other in others:
            if name == other:
                cells += [None] * 4
                continue
            rho = results.mean(one, results.agreement(one, found.methods[other]))
            tau = results.mean(one, results.agreement(one, found.methods[other], kendall=True))
            cells += [rho.mean, rho.low, rho.high, tau.mean]
            numbers[f"spearman.{other}.{name}"] = rho.mean
        rows.append((name, *cells))
    short = {GRADIENT: "gradient", LEAVE_ONE_OUT: "leave-one-out"}
    columns = (
        "method",
        *(f"{short[other]}: {what}" for other in others for what in ("Spearman", "from", "to", "Kendall")),
    )
    table = Table(
        "agreement",
        "Rank correlation of token scores",
        columns,
        tuple(rows),
        dict.fromkeys(columns[1:], PLACES),
    )
    return Section("agreement", "Agreement with gradient x input and leave-one-out", _AGREEMENT, (table,), (), numbers)


def _drawn(found: Results, erasure: str) -> list[str]:
    """The best methods and the references: more lines could not be told apart."""
    references = [name for name in (GRADIENT, LEAVE_ONE_OUT, RANDOM) if name in found.methods]
    best = [name for name in results.best_first(found, erasure) if name not in references]
    return [*best[:SHOWN], *references]


_SIDES = (results.comprehensiveness, results.sufficiency)

_AOPC = (
    "Tokens are ranked by a method's scores for the target. Comprehensiveness is what the probability of the target "
    "loses when the top of the ranking is taken away: the higher, the better the method found what the model needs. "
    "Sufficiency is what it loses when nothing but the top is left: the lower, the better.\n\n"
    "AOPC is the mean over the shares of tokens 10, 20, ... 90 % (DecompX) and, in the columns so marked, 1, 5, 10, "
    "20, 50 % (ERASER); counts of tokens are rounded up. Intervals are 95 % bootstraps over entries; the lead over "
    "random scores is paired by entry, its p-value two-sided."
)
_ACCURACY = (
    "How often the model still makes the choice that it made with all tokens, when the top of a method's ranking is "
    "taken away: the lower, the better. Where the entries have labels, or the text tells the right token, also how "
    "often that choice is right."
)
_CURVES = (
    "The probability of the target while tokens are taken away, or put back, in the order of a method's ranking. "
    "Deletion: the lower the curve, the better; insertion: the higher. Areas are means over the whole range, by the "
    "trapezoidal rule."
)
_AGREEMENT = (
    "Spearman's and Kendall's (tau-b) rank correlations of the scores of a text's tokens with those of gradient x "
    "input and of leave-one-out (the loss of probability when one token is masked), mean over contexts. Agreement "
    "with another method is not faithfulness: it says which methods tell the same story."
)
