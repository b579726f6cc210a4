"""The plan of a corpus run: every option that its results depend on, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from normscope.analyzer import Analyzer
from normscope.corpus.measure_registry import Measure, find_registered_measures
from normscope.engine.request import Options, requests_for
from normscope.errors import NormscopeError

MaskDraw = Literal["sequence", "authors"]


@dataclass(frozen=True)
class Plan:
    """Everything that the results depend on besides model and data."""

    measures: tuple[str, ...] = ("mixing",)
    maps: tuple[str, ...] = ()  # scopes whose maps are stored
    scopes: tuple[str, ...] | None = None  # None: those that the measures and maps need, or all
    layers: tuple[int, ...] | None = None
    gate: str = "ig"
    value_bias: str = "token"
    truncation: bool = False
    mask_seed: int | None = None
    batch_size: int = 16
    shard_size: int = 128
    settings: Mapping[str, Any] = field(default_factory=dict)  # plain values for measures that read a Sample
    mask_draw: MaskDraw = "sequence"  # masked tokens: for each sequence by its id, or for all in corpus order
    memory_budget: int | None = None  # bytes; decides about batches, and so about rounding only

    @property
    def draws_in_order(self) -> bool:
        """Whether masked tokens are drawn for the whole corpus, in its order."""
        return self.mask_seed is not None and self.mask_draw == "authors"

    def to_manifest(self) -> dict[str, Any]:
        """The options as the manifest of a run stores them; empty settings and the usual draw of masks are omitted. The
        memory budget is stored beside them."""
        usual = {"settings": not self.settings, "mask_draw": not self.draws_in_order, "memory_budget": True}
        return {key: value for key, value in asdict(self).items() if not usual.get(key, False)}


def check_plan_counts(**counts: Any) -> None:
    """Refuse any option that is not an integer of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise NormscopeError(f"{name} must be an integer of at least 1, not {value!r}.")


def names_in_plan_option(option: str, given: Any) -> tuple[str, ...]:
    """The names in an option that takes one name or several."""
    names = (given,) if isinstance(given, str) or not hasattr(given, "__iter__") else tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise NormscopeError(f"{option} must be names, not {type(name).__name__} {name!r}.")
    return names


def check_plan(plan: Plan, lens: Analyzer) -> None:
    """Refuse a plan that the model cannot carry out: unknown measures or scopes, or masking without a mask token."""
    if plan.mask_seed is not None and (lens.two_sided or getattr(lens.tokenizer, "mask_token_id", None) is None):
        raise NormscopeError(f"{lens.family.name} has no mask token here: leave the masking out.")
    if plan.mask_draw not in get_args(MaskDraw):
        raise NormscopeError(f"mask_draw must be one of {', '.join(get_args(MaskDraw))}, not {plan.mask_draw!r}.")
    scopes = scopes_required_by_plan(plan, find_registered_measures(plan.measures))
    options = Options(scopes=scopes, layers=plan.layers, gate=plan.gate, value_bias=plan.value_bias)
    requests_for(lens.loaded, options)


def scopes_required_by_plan(plan: Plan, measures: Sequence[Measure]) -> list[str] | None:
    """The scopes to compute: those in the plan, or else those that measures and maps need; None for all."""
    if plan.scopes is not None:
        return list(dict.fromkeys([*plan.scopes, *plan.maps]))
    if any(measure.scopes is None for measure in measures):
        return None
    return list(dict.fromkeys([*(scope for measure in measures for scope in measure.scopes or ()), *plan.maps]))
