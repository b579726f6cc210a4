"""Explain an answer: every token's contrast in one backward pass over blocks of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.errors import NormscopeError, NormscopeWarning
from normscope.explain.answers import AnsweredItem
from normscope.explain.groups import SpelledText, part_text, spell_side
from normscope.explain.hops import Hop, follow_hops
from normscope.explain.result import PROMPT, Alternative, Explanation
from normscope.flow.continuations import AGAINST, OTHER, contrast_flows
from normscope.flow.exact import exact_score_blocks
from normscope.flow.maps import FrozenModel
from normscope.flow.resolve import TargetRequest, check_against, resolve_target
from normscope.flow.result import Flow, ScoreMatrix
from normscope.flow.run import (
    flow_columns,
    flow_info,
    freeze_for_target,
    inexact_scores_warning,
    source_columns,
    steps_to_freeze,
)
from normscope.flow.spans import written_ids
from normscope.flow.targets import Target, build_target_matrix
from normscope.inputs.item import ANSWER, Item, token_names
from normscope.inputs.marked_text import REST
from normscope.labels import Label
from normscope.models.loaded import LoadedModel
from normscope.step_progress import FOLLOWED

EXPLAINED = "tokens explained"  # a part of the progress
THOUGHT = "</think>"  # the end of the reasoning, if the user does not say where it is


@dataclass(frozen=True)
class ExplainOptions:
    """How an answer is explained."""

    against: object = "runner-up"
    gate: str = "ig"
    alternatives: int = 5
    hops: int = 0
    final: str | None = None


@dataclass(frozen=True)
class _ExplainedTokens:
    """The tokens of one answer: a flow with a matrix, and what the model predicted at each."""

    flow: Flow
    rows: tuple[Label, ...]
    probabilities: Tensor
    alternatives: tuple[tuple[Alternative, ...], ...]
    stopped: bool
    total: int  # the number of tokens, those that were not explained before Ctrl-C included


def steps_to_explain(loaded: LoadedModel, generate: int | None) -> dict[str, int]:
    """The steps that are known before the answer is, by part."""
    return steps_to_freeze(loaded, generate) | ({} if generate is None else {EXPLAINED: generate})


def run_explanation(loaded: LoadedModel, answers: Sequence[AnsweredItem], options: ExplainOptions) -> Explanation:
    """The explanation of the first answer; with a second, of the difference of their log-probabilities."""
    contrast = len(answers) == 2
    baseline = None if contrast else options.against
    told: list[_ExplainedTokens] = []
    for one in reversed(answers):  # the other answer first: if the user stops the second pass, its rows are complete
        if told and told[-1].stopped:
            raise KeyboardInterrupt
        request = TargetRequest(one.span, None, baseline, contrast, True)
        told.append(_explain_tokens(loaded, one, request, options))
    first, flow = told[-1], told[-1].flow
    if contrast:
        flow = _contrast_answers(first, told[0])
    each = flow.each
    assert each is not None
    item, rows = answers[0].item, first.rows[: len(each.targets)]
    begin = rows[0].position
    texts = _spell_item(loaded, item, begin)
    if contrast:
        texts[OTHER] = _spell_item(loaded, answers[1].item, begin)[loaded.stacks[-1].side]
    info = {**flow.info, "against": options.against}
    warned = inexact_scores_warning(loaded, "targets of the answer", float(each.completeness.max()))
    notes = [*flow.warnings, *([warned] if warned else [])]
    if notes:
        info["warnings"] = notes
    made = Explanation(
        answer=_answer_text(loaded, item, rows),
        rows=rows,
        columns=flow.columns,
        targets=each.targets,
        scores=each.scores,
        values=each.values.cpu(),
        remainder=each.remainders.cpu(),
        completeness=each.completeness.cpu(),
        probabilities=first.probabilities,
        alternatives=first.alternatives,
        sources=flow.sources,
        texts=texts,
        info=info,
    )
    for text in notes:
        warnings.warn(text, NormscopeWarning, stacklevel=4)  # at the call of Analyzer.explain
    return made if options.hops == 0 else replace(made, hops=_find_hops(made, options))


def check_explain_options(options: ExplainOptions) -> None:
    """Refuse options that cannot be used, before anything runs."""
    check_against(options.against)
    if options.gate == "tangent":
        raise NormscopeError("Tangent gates do not add up to the model's own states. Use gate='ig' or 'frozen'.")
    for name in ("alternatives", "hops"):
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise NormscopeError(f"{name} must be a number of at least 0, not {value!r}.")
    if options.final is not None and options.hops == 0:
        raise NormscopeError("final= says where the final answer begins, for hops=: pass hops=1 or more.")
    if options.hops and isinstance(options.against, str) and options.against not in AGAINST:
        raise NormscopeError("Hops go through the reasoning of one answer: leave the text out of against=.")


def _explain_tokens(
    loaded: LoadedModel, answered: AnsweredItem, request: TargetRequest, options: ExplainOptions
) -> _ExplainedTokens:
    item = answered.item
    model = freeze_for_target(loaded, item, request, options.gate)
    target = resolve_target(loaded, model, item, request)
    each, stopped = _score_tokens(model, target)
    columns = flow_columns(loaded, item)
    ids = written_ids(loaded, item)
    side = loaded.stacks[-1].side
    places = (target.rows[: len(each.targets)] + 1).tolist()
    names = item.sides[side].names
    rows = tuple(Label(names[n], side, n) for n in places)
    assert model.logits is not None
    probabilities, alternatives = _predictions(loaded, model.logits, target.rows, ids[places], options.alternatives)
    info = flow_info(loaded, item, options.gate)
    if stopped:
        note = f"Stopped after {len(each.targets)} of {len(target.descriptions)} tokens of the answer."
        info["warnings"] = [*info.get("warnings", []), note]
    flow = Flow(
        method="exact",
        rows=tuple(label for label in columns if label.side == side),
        columns=columns,
        layers=tuple(range(loaded.depths[-1])),
        to=each.total(),
        each=each,
        sources=source_columns(item, columns) or _plain_sources(loaded, item, columns, set(places)),
        info=info,
    )
    return _ExplainedTokens(flow, rows, probabilities, alternatives, stopped, len(target.descriptions))


def _score_tokens(model: FrozenModel, target: Target) -> tuple[ScoreMatrix, bool]:
    """The scores of every token, or of those that were done when the user pressed Ctrl-C."""
    found: list[Tensor] = []
    constants: list[Tensor] = []
    stopped = False
    try:
        for scores, left in exact_score_blocks(model, target):
            found.append(scores)
            constants.append(left)
            if steps := FOLLOWED.get():
                steps.report(EXPLAINED, sum(map(len, constants)), len(target.descriptions))
    except KeyboardInterrupt:
        if not constants:
            raise
        stopped = True
        del found[len(constants) :]
    count = sum(map(len, constants))
    done = target.first(count)
    return build_target_matrix(done, model, torch.cat(found), torch.cat(constants)), stopped


def _plain_sources(
    loaded: LoadedModel, item: Item, columns: Sequence[Label], answer: set[int]
) -> dict[str, tuple[int, ...]]:
    """Each picture, the rest of the prompt, and the answer so far as sources; the decoder's start token is the rest."""
    side = loaded.stacks[-1].side
    first = min(answer)
    seen = {n: one.name for one in item.pictures for n in one.positions}
    found: dict[str, list[int]] = {name: [] for name in (*(one.name for one in item.pictures), PROMPT, ANSWER, REST)}
    for k, label in enumerate(columns):
        if label.side == side and label.position in seen:
            found[seen[label.position]].append(k)
        elif label.side != side or (label.position < first and not loaded.two_sided):
            found[PROMPT].append(k)
        else:
            found[ANSWER if label.position >= first else REST].append(k)
    return {name: tuple(some) for name, some in found.items() if some or name != REST}


def _predictions(
    loaded: LoadedModel, logits: Tensor, rows: Tensor, ids: Tensor, count: int
) -> tuple[Tensor, tuple[tuple[Alternative, ...], ...]]:
    """The probability of each token that was written, and the most probable tokens in its place."""
    probabilities, alternatives = [], []
    for row, index in zip(rows.tolist(), ids.tolist(), strict=False):
        p = logits[row].double().softmax(-1)
        best = p.topk(min(count, len(p)))
        names = token_names(best.indices.tolist(), loaded.tokenizer)
        probabilities.append(p[index])
        alternatives.append(tuple(map(Alternative, names, best.values.tolist())))
    return torch.stack(probabilities).cpu(), tuple(alternatives)


def _contrast_answers(one: _ExplainedTokens, other: _ExplainedTokens) -> Flow:
    """Token i of an answer minus token i of the other, as log-probabilities. Where one is longer, its tokens stand
    alone; those of a longer other answer are subtracted from the last token."""
    assert one.flow.each is not None
    assert other.flow.each is not None
    aligned = _align_rows(other.flow.each, one.total).first(len(one.flow.each.targets))
    begin = one.rows[0].position
    shared = sum(label.position < begin for label in one.flow.rows)
    return contrast_flows(one.flow, replace(other.flow, each=aligned), shared, None)


def _align_rows(matrix: ScoreMatrix, count: int) -> ScoreMatrix:
    """The matrix with `count` rows: zeros added, or the rows that are too many added to the last."""
    index = torch.arange(len(matrix.targets)).clamp_max(count - 1)

    def align(x: Tensor) -> Tensor:
        return x.new_zeros(count, *x.shape[1:]).index_add_(0, index.to(x.device), x)

    names = [*matrix.targets, *["nothing"] * count][:count]
    if len(matrix.targets) > count:
        names[-1] = f"the last {len(matrix.targets) - count + 1} tokens"
    return ScoreMatrix(
        tuple(names),
        align(matrix.values),
        align(matrix.scores),
        align(matrix.remainders),
        align(matrix.completeness),
        matrix.contrast,
    )


def _spell_item(loaded: LoadedModel, item: Item, begin: int) -> dict[str, SpelledText]:
    """The text of each side; the answer begins at a position of the last one."""
    found = {}
    for side, tokens in item.sides.items():
        ids = None
        if side == loaded.stacks[-1].side:
            ids = written_ids(loaded, item).tolist()
        elif "input_ids" in item.tensors:
            ids = item.tensors["input_ids"].tolist()
            ids = [-1] * (len(tokens.names) - len(ids)) + ids
        sound = ids is None and loaded.family.input == "audio"
        found[side] = spell_side(loaded.tokenizer, ids, tokens.names, sound)
    if item.pictures:
        found = {name: part_text(one, [p.positions[0] for p in item.pictures]) for name, one in found.items()}
    side = loaded.stacks[-1].side
    found[side] = replace(found[side], answer=found[side].spans[begin][0])
    return found


def _answer_text(loaded: LoadedModel, item: Item, rows: Sequence[Label]) -> str:
    """The text of the answer without special tokens."""
    ids = written_ids(loaded, item)[[label.position for label in rows]].tolist()
    text = spell_side(loaded.tokenizer, ids, [label.token for label in rows]).text
    return text.strip()


def _find_hops(told: Explanation, options: ExplainOptions) -> tuple[Hop, ...]:
    """The hops from the final part of the answer through the part before it."""
    one = told.texts[told.rows[0].side]
    begin = one.spans[told.rows[0].position][0]
    end = one.spans[told.rows[-1].position][1]
    answer = one.text[begin:end]
    wanted = THOUGHT if options.final is None else str(options.final).strip()
    count = answer.count(wanted) if wanted else 0
    if count != 1:
        where = "It is empty." if not wanted else f"{wanted!r} occurs {count} times in the answer {answer[:200]!r}."
        raise NormscopeError(f"Pass final=, a piece of the answer with which its final part begins. {where}")
    start = begin + answer.index(wanted) + (len(wanted) if options.final is None else 0)
    spans = [one.spans[label.position] for label in told.rows]
    final = [n for n, (_, stop) in enumerate(spans) if stop > start]
    reasoning = [n for n in range(len(spans)) if n not in final]
    if not final or not reasoning:
        raise NormscopeError("Hops need reasoning before the final answer, and the answer after it.")
    places = {(label.side, label.position): k for k, label in enumerate(told.columns)}
    columns = [places[told.rows[n].side, told.rows[n].position] for n in reasoning]
    return follow_hops(told.scores, told.remainder, final, reasoning, columns, options.hops)
