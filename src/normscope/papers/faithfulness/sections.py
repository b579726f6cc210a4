"""Report sections: AOPC, accuracy without the top tokens, curves, and agreement between methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from normscope.measures.faithfulness import Interval
from normscope.papers.faithfulness import results
from normscope.papers.faithfulness.measures import SHARES
from normscope.papers.faithfulness.results import DECOMPX, ERASER, MethodResult, Results, mean_over_entries
from normscope.papers.faithfulness.scores import GRADIENT, LEAVE_ONE_OUT, RANDOM
from normscope.reports import charts
from normscope.reports.report import Cell, Picture, Section, Table

SHOWN = 4  # methods in a chart of curves, in addition to the references
NAMES = {"mask": "masking", "delete": "deletion"}
REFERENCES = {GRADIENT: "gradient", LEAVE_ONE_OUT: "leave-one-out", RANDOM: "random"}
TAKEN = "share of tokens removed, highest scores first"
PRESENT = "share of tokens present, highest scores first"
AOPC = (
    "Tokens are ranked by a method's scores for the target. Comprehensiveness is the drop in the target's probability "
    "when the top of the ranking is removed; higher is better. Sufficiency is the drop when only the top of the "
    "ranking is kept; lower is better.\n\n"
    "AOPC is the mean over removing 10, 20, ..., 90 % of the tokens (DecompX) or, in the columns marked ERASER, 1, 5, "
    "10, 20 and 50 %; numbers of tokens are rounded up. Intervals are 95 % bootstrap intervals over entries. The lead "
    "over random scores is paired by entry; its p-value is two-sided."
)
ACCURACY = (
    "How often the model keeps the choice it made with all tokens when the top of a method's ranking is removed; "
    "lower is better. If the correct answer is known (a label, or the actual token), the accuracy is reported as well."
)
CURVES = (
    "The probability of the target while tokens are removed (deletion) or added (insertion) in the order of a method's "
    "ranking. Lower is better for deletion, higher for insertion. Areas are computed with the trapezoidal rule over "
    "the whole range."
)
AGREEMENT = (
    "Spearman's and Kendall's (tau-b) rank correlations of token scores with those of gradient x input and of "
    "leave-one-out (the drop in probability when a single token is masked), averaged over contexts. Agreement with "
    "another method is not faithfulness; it shows which methods give similar rankings."
)


def aopc_section(found: Results, erasures: Sequence[str]) -> Section:
    """Comprehensiveness and sufficiency of every method."""
    tables, numbers = [], {}
    order = results.methods_best_first(found, erasures[0])
    bars: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for erasure in erasures:
        rows: list[tuple[Cell, ...]] = []
        for name in order:
            one = found.methods[name]
            comp, suff = (mean_over_entries(one, measure(one, erasure)) for measure in results.AOPC)
            eraser = [mean_over_entries(one, measure(one, erasure, ERASER)).mean for measure in results.AOPC]
            lead = results.comprehensiveness_lead(one, found.methods[RANDOM], erasure)
            beyond = (None, None, None, None) if name == RANDOM else (*_mean_and_ends(lead), lead.p)
            rows.append((name, *_mean_and_ends(comp, suff), *eraser, *beyond, len(one.contexts)))
            numbers[f"comprehensiveness.{erasure}.{name}"] = comp.mean
            numbers[f"sufficiency.{erasure}.{name}"] = suff.mean
            bars.setdefault(NAMES[erasure], []).append(comp.mean)
            errors.setdefault(NAMES[erasure], []).append((comp.high - comp.low) / 2)
        columns = (
            *("comp.", "comp. from", "comp. to", "suff.", "suff. from", "suff. to"),
            *("comp. (ERASER)", "suff. (ERASER)", "above random", "above from", "above to"),
        )
        title = f"AOPC by {NAMES[erasure]}"
        tables.append(_method_table(f"aopc-{erasure}", title, columns, rows, {"p": ".4f", "contexts": ""}))
    chart = charts.bar_chart(bars, x=order, xlabel="", ylabel="AOPC", errors=errors)
    picture = Picture("aopc", "Comprehensiveness", chart, "Error bars: 95 % bootstrap intervals over entries.")
    return Section("aopc", "Comprehensiveness and sufficiency", AOPC, (picture, *tables), (), numbers)


def choice_accuracy_section(found: Results, erasures: Sequence[str]) -> Section:
    """How often the model keeps its choice, and its accuracy, without the top tokens."""
    parts: list[Table | Picture] = []
    numbers = {}
    columns = (*(f"{100 * share:.0f} %" for share in DECOMPX), "mean", "from", "to")
    kinds = {"kept": "Choices kept"} | ({"accuracy": "Accuracy"} if found.labelled else {})
    for erasure in erasures:
        for kind, title in kinds.items():
            rows: list[tuple[Cell, ...]] = []
            for name in results.methods_best_first(found, erasure):
                one = found.methods[name]
                values = results.choices_kept(one, erasure, one.choice if kind == "kept" else one.given)
                each = [mean_over_entries(one, values[:, k]).mean for k in range(len(DECOMPX))]
                whole = mean_over_entries(one, values.mean(1))
                rows.append((name, *each, *_mean_and_ends(whole)))
                numbers[f"{kind}.{erasure}.{name}"] = whole.mean
            title = f"{title} without the top tokens, by {NAMES[erasure]}"
            parts.append(_method_table(f"{kind}-{erasure}", title, columns, rows))

        def curve(one: MethodResult, erasure: str = erasure) -> Any:
            return results.choices_kept(one, erasure, one.choice).mean(0)

        series = _best_curves(found, erasure, curve)
        chart = charts.line_chart(series, x=DECOMPX, xlabel=TAKEN, ylabel="share of contexts", ylim=(0, 1))
        parts.append(Picture(f"kept-{erasure}-curve", f"{kinds['kept']}, by {NAMES[erasure]}", chart))
    return Section("accuracy", "Accuracy without the top tokens", ACCURACY, tuple(parts), (), numbers)


def probability_curves_section(found: Results, erasures: Sequence[str]) -> Section:
    """Deletion and insertion curves, and the areas under them."""
    parts: list[Table | Picture] = []
    numbers = {}
    for erasure in erasures:
        rows: list[tuple[Cell, ...]] = []
        for name in results.methods_best_first(found, erasure):
            one = found.methods[name]
            areas = [results.probability_curve_area(one, erasure, kind) for kind in ("without", "only")]
            deletion, insertion = (mean_over_entries(one, area) for area in areas)
            rows.append((name, *_mean_and_ends(deletion, insertion)))
            numbers[f"deletion.{erasure}.{name}"] = deletion.mean
            numbers[f"insertion.{erasure}.{name}"] = insertion.mean
        columns = ("deletion", "del. from", "del. to", "insertion", "ins. from", "ins. to")
        parts.append(_method_table(f"areas-{erasure}", f"Areas under the curves, by {NAMES[erasure]}", columns, rows))
        for kind, title, xlabel in (("without", "Deletion", TAKEN), ("only", "Insertion", PRESENT)):
            series = _best_curves(found, erasure, lambda one, key=(erasure, kind): np.mean(one.after[key], axis=0))
            chart = charts.line_chart(series, x=SHARES, xlabel=xlabel, ylabel="probability of the target")
            parts.append(Picture(f"{title.lower()}-{erasure}", f"{title} curves, by {NAMES[erasure]}", chart))
    return Section("curves", "Deletion and insertion curves", CURVES, tuple(parts), (), numbers)


def score_agreement_section(found: Results) -> Section | None:
    """Rank correlations with gradient x input and leave-one-out; None if the run has neither."""
    others = [name for name in (GRADIENT, LEAVE_ONE_OUT) if name in found.methods]
    if not others:
        return None
    rows: list[tuple[Cell, ...]] = []
    numbers = {}
    for name, one in found.methods.items():
        cells: list[float | None] = []
        for other in others:
            if name == other:
                cells += [None] * 4
                continue
            rho, tau = (
                mean_over_entries(one, results.score_correlations(one, found.methods[other], kendall))
                for kendall in (False, True)
            )
            cells += [*_mean_and_ends(rho), tau.mean]
            numbers[f"spearman.{other}.{name}"] = rho.mean
        rows.append((name, *cells))
    columns = [f"{REFERENCES[other]}: {what}" for other in others for what in ("Spearman", "from", "to", "Kendall")]
    table = _method_table("agreement", "Rank correlation of token scores", columns, rows)
    return Section("agreement", "Agreement with gradient x input and leave-one-out", AGREEMENT, (table,), (), numbers)


SECTIONS = (aopc_section, choice_accuracy_section, probability_curves_section)


def _method_table(
    name: str, title: str, columns: Sequence[str], rows: Sequence[tuple[Cell, ...]], more: dict[str, str] | None = None
) -> Table:
    """A table with a row per method and numbers with three decimals."""
    return Table.of(name, title, {"method": "", **dict.fromkeys(columns, ".3f"), **(more or {})}, rows)


def _mean_and_ends(*intervals: Interval) -> list[float]:
    """The cells of a mean with its interval: mean, from, to."""
    return [cell for one in intervals for cell in (one.mean, one.low, one.high)]


def _best_curves(found: Results, erasure: str, curve: Any) -> dict[str, list[float]]:
    """Curves of the best methods and the references; more lines would be illegible."""
    references = [name for name in REFERENCES if name in found.methods]
    best = [name for name in results.methods_best_first(found, erasure) if name not in references]
    return {name: [float(value) for value in curve(found.methods[name])] for name in (*best[:SHOWN], *references)}
