"""One case: a model of some family, up to three attacks, an input, a question to the library, and the judge's verdict.

All of it follows from the seed. The outcome is right, refused (a NormscopeError), warned or failed.
"""

import contextlib
import random
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils import logging

from normscope import Analyzer, NormscopeError
from tests.attacks import (  # noqa: F401  (they list themselves)
    adapters,
    attending,
    casts,
    encodings,
    hooked,
    replaced,
    settings,
    surgery,
    surroundings,
)
from tests.attacks.deciding import decide
from tests.attacks.families import build, heads, inputs, variants
from tests.attacks.judge import Verdict
from tests.attacks.judging import judged
from tests.attacks.outcome import FAILED, REFUSED, Outcome
from tests.attacks.question import Question, asked, copied, drawn
from tests.attacks.recording import callable_of
from tests.attacks.subject import ATTACKS, Inapplicable, Subject, around
from tests.helpers.tiny import FAMILIES

SHORT = {torch.float32: "float32", torch.float64: "float64"}


def run(seed: int) -> Outcome:
    """The outcome of one case; the global random state is left unchanged."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            return _run(seed, random.Random(seed))
        except Exception as error:  # an attack or the judge is wrong: that is to be seen, too
            return Outcome(seed, FAILED, f"the attack itself: {''.join(traceback.format_exception(error)[-3:])}", "")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' log messages about attacked models."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _run(seed: int, rng: random.Random) -> Outcome:
    subject = drawn_subject(rng)
    question = drawn(rng, subject)
    outcome = Outcome(seed, FAILED, "", f"{subject.name} {subject.head or 'base'} {SHORT[subject.dtype]}")
    original, lens = subject.model, None
    if question.late:
        lens = Analyzer(subject.model)
        if question.warm:
            subject.earlier = lens.analyze(subject.encoding)
            entered = copied(subject.encoding)
    outcome.attacks = attacked(rng, subject, question.late)
    if question.late:
        subject.model = original
    if question.kind == "vectors" and subject.earlier is not None:
        subject.encoding = entered
    if subject.virtual and "rows" in question.options:
        question.options["rows"] = [-1]
    some = any(kind in said for kind in ("one token", "far") for said in outcome.attacks.values())
    if some:  # the judge reads such a module for all rows or for none
        question.options.pop("rows", None)
    outcome.call = str(question)
    with around(subject.surroundings):
        verdicts, reason = judged(subject, question)
    outcome.judged = reason or f"error {verdicts[0].error_in(question.part):.1e}"
    before = fingerprint(subject.model)
    try:
        made, said = asked(rng, lens, subject, question)
    except NormscopeError as error:
        outcome.kind, outcome.why = REFUSED, str(error)
        if not outcome.attacks and verdicts and there(verdicts[0], question):
            outcome.kind, outcome.why = FAILED, f"refused without an attack: {error}"
    except Exception as error:
        outcome.why = f"{type(error).__name__}: {error}"
    else:
        decide(outcome, made, said, verdicts, question, subject)
    if outcome.kind != FAILED and fingerprint(subject.model) != before:
        outcome.kind, outcome.why = FAILED, "the model is not as it was"
    return outcome


def drawn_subject(rng: random.Random) -> Subject:
    name = rng.choice(FAMILIES)
    known, kinds = heads(name), variants(name)
    head = rng.choices(known, [4, 3, 2, 1][: len(known)])[0]  # one model for many cases: to build one takes a while
    variant = rng.choices(range(len(kinds)), [3, 1, 1][: len(kinds)])[0]
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    model = build(name, head, dtype, variant)
    with contextlib.suppress(ValueError, ImportError):
        model.set_attn_implementation(rng.choice(["eager", "sdpa"]))
    encoding = inputs(name, model, head, rng.randint(3, 7), rng.randint(2, 5), rng.randrange(10**6))
    return Subject(name, head, dtype, model, encoding)


def attacked(rng: random.Random, subject: Subject, late: bool) -> dict[str, str]:
    """Apply up to three attacks; now and then none."""
    wanted = rng.choices([0, 1, 2, 3], [3, 52, 30, 15])[0]
    names = [name for name, listed in ATTACKS.items() if listed.late or not late]
    done: dict[str, str] = {}
    for _ in range(12):
        if len(done) == wanted:
            break
        name = rng.choices(names, [ATTACKS[one].weight for one in names])[0]
        if name in done:
            continue
        with contextlib.suppress(Inapplicable):
            done[name] = ATTACKS[name].attack(rng, subject)
    if "training" not in done and rng.random() < 0.98:  # new modules start in training mode
        subject.model.eval()
    return done


def there(verdict: Verdict, question: Question) -> bool:
    """True if the requested layers exist."""
    depth = max(len(layers) for layers in verdict.layers.values())
    return all(n < depth for n in question.options.get("layers", ()))


def fingerprint(model: Any) -> list[Any]:
    """Everything the library must leave unchanged. transformers itself adds hooks if a config requests all states."""
    found: list[Any] = []
    for path, module in callable_of(model).named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        others = [one for one in hooks if not str(getattr(one, "__module__", "")).startswith("transformers")]
        found.append((path, len(others), module.training))
        config = vars(module).get("config")
        if config is not None:
            found.append(getattr(config, "_attn_implementation", None))
    found += [(id(p), p._version, p.dtype) for p in callable_of(model).parameters() if not p.is_inference()]
    return found
