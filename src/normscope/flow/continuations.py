"""Texts of several tokens as targets: the continuation of the input by its tokens, and the contrast of two of them.

A continuation ``y_1 .. y_m`` is appended to the input, and every token is read where it is predicted: the target is
``sum_t z_(y_t)``, the logits of its tokens given the input and the tokens before. A contrast of two continuations takes
a pass for each. Its scores on the input are the differences; the tokens of the first continuation and those of the
second, which only one of the passes has, follow as columns of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from normscope.errors import NormscopeError
from normscope.flow.resolve import TargetRequest
from normscope.flow.result import Flow, ScoreMatrix, Scores
from normscope.flow.target_names import target_pieces, target_token_id
from normscope.inputs.generation import append_written_tokens
from normscope.inputs.item import Item, check_length
from normscope.models.loaded import LoadedModel

AGAINST = ("runner-up", "mean")  # baselines that are not the name of a token
OTHER = "other"  # the side of the tokens that only the second of two contrasted texts has


@dataclass(frozen=True)
class Continuation:
    """An input with a continuation, and the request that explains it."""

    item: Item
    request: TargetRequest


def find_continuations(loaded: LoadedModel, item: Item, request: TargetRequest) -> list[Continuation]:
    """The continuations that a target names, one or two; none if each of its texts is one token, or no text."""
    texts = list(request.target) if isinstance(request.target, tuple) else [request.target]
    if isinstance(request.against, str) and request.against not in AGAINST:
        texts.append(request.against)
    writes = loaded.stacks[-1].side == "decoder" and loaded.model.can_generate() and loaded.tokenizer is not None
    if not writes or request.position is not None or not all(isinstance(one, str) and one != "top" for one in texts):
        return []
    if all(target_token_id(loaded, text) is not None for text in texts):
        return []
    against = request.against if request.against in AGAINST else None
    found = [_continue_with(loaded, item, text, replace(request, against=against)) for text in texts]
    lengths = [one.request.target.stop - one.request.target.start for one in found]
    if len(set(lengths)) > 1 and not request.log_prob:
        raise NormscopeError(
            f"{texts[0]!r} has {lengths[0]} tokens and {texts[1]!r} {lengths[1]}, and sums of so many logits cannot be "
            "compared. Pass log_prob=True: the log-probability of a text is a sum over its tokens, of any length."
        )
    if len(found) == 2 and request.each and len(set(lengths)) > 1:
        raise NormscopeError("each=True pairs the tokens of two continuations in order, so they need the same length.")
    return found


def _continue_with(loaded: LoadedModel, item: Item, text: str, request: TargetRequest) -> Continuation:
    pieces = target_pieces(loaded, text)
    ids = torch.tensor(loaded.tokenizer.convert_tokens_to_ids(pieces))
    longer = append_written_tokens(item, ids, loaded.tokenizer)
    begin, end = (len(one.sides["decoder"].names) for one in (item, longer))
    limits = loaded.target_limits if loaded.two_sided else loaded.limits
    warnings = check_length(end, limits, f"The input with {text!r}", "Shorten it.")
    longer = replace(longer, warnings=(*item.warnings, *warnings))
    return Continuation(longer, replace(request, target=slice(begin, end)))


def contrast_flows(one: Flow, other: Flow, shared: int, target: Any) -> Flow:
    """The first flow minus the second. They have the first `shared` columns of the side that writes in common, and all
    columns of another side. It has no maps."""
    own, their = (sum(label.side == flow.rows[0].side for label in flow.columns) for flow in (one, other))
    before, mine, after = range(shared), range(shared, own), range(own, len(one.columns))
    yours, later = range(shared, their), range(their, len(other.columns))
    assert [one.columns[k] for k in (*before, *after)] == [other.columns[k] for k in (*before, *later)]

    def subtract(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        common = a[..., [*before, *after]] - b[..., [*before, *later]]
        parts = (common[..., :shared], a[..., list(mine)], -b[..., list(yours)], common[..., shared:])
        return torch.cat(parts, dim=-1)

    columns = [one.columns[k] for k in (*before, *mine)] + [other.columns[k]._replace(side=OTHER) for k in yours]
    sources: dict[str, list[int]] = {name: [] for name in (*one.sources, *other.sources)}
    places = {k: n for n, k in enumerate((*before, *mine))} | {k: n + len(yours) for n, k in enumerate(after, own)}
    for name, some in one.sources.items():
        sources[name] += [places[k] for k in some]
    for name, some in other.sources.items():
        sources[name] += [own + k - shared for k in some if k in yours]
    return replace(
        one,
        rows=one.rows[:shared],
        columns=(*columns, *(one.columns[k] for k in after)),
        to=_subtract_scores(one.to, other.to, subtract),
        each=_subtract_matrices(one.each, other.each, subtract),
        sources={name: tuple(sorted(some)) for name, some in sources.items()},
        info={**one.info, "target": target},
        _maps=None,
    )


def _subtract_scores(one: Scores | None, other: Scores | None, subtract: Any) -> Scores | None:
    if one is None or other is None:
        return None
    scores = subtract(one.scores, other.scores)
    value, remainder = one.value - other.value, one.remainder - other.remainder
    # Not relative to the difference, which is rounding where both continuations begin alike.
    size = max(*(max(abs(each.value), float(each.scores.double().abs().sum())) for each in (one, other)), 1e-30)
    error = abs(float(scores.double().sum()) + remainder - value) / size
    return Scores(f"{one.target} minus {other.target}", value, scores, remainder, error, contrast=True)


def _subtract_matrices(one: ScoreMatrix | None, other: ScoreMatrix | None, subtract: Any) -> ScoreMatrix | None:
    if one is None or other is None:
        return None
    scores = subtract(one.scores, other.scores)
    values, remainders = one.values - other.values, one.remainders - other.remainders
    sizes = [torch.maximum(each.values.abs(), each.scores.double().abs().sum(-1)) for each in (one, other)]
    size = torch.maximum(*sizes).clamp_min(1e-30)
    error = (scores.double().sum(-1) + remainders - values).abs() / size
    names = tuple(f"{a} minus {b}" for a, b in zip(one.targets, other.targets, strict=True))
    return ScoreMatrix(names, values, scores, remainders, error, contrast=True)
