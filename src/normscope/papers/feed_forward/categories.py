"""What the amplified pairs are: subwords of one word, repeated subwords, function words, special tokens and others.

Categories are decided by the form of the tokens and by the words they belong to, without a tagger; the first that fits
applies. Function words are an English closed-class list.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from normscope.measures.amplification import draw_p_values
from normscope.measures.tokens import BEGINS, CONTINUES, is_punctuation_token
from normscope.papers.common import layer_numbers
from normscope.papers.feed_forward.maps import AmplifiedPairs, Numbers, Texts, Values
from normscope.papers.feed_forward.measures import SPECIAL
from normscope.reports.report import Cell, Table

CATEGORIES = (
    *("special token", "same subword", "one word", "number or punctuation"),
    *("function words", "function and content", "content words"),
)
DESCRIPTION = (
    "The categories of pairs, of which the first that fits applies. Special token: one of the two is special. Same "
    "subword: both have the same form, at two positions. One word: at least half of the pair's occurrences are within "
    "one word. Number or punctuation: one of the two contains a digit or consists of punctuation. Function words: both "
    "are in a list of {count} English function words; function and content: one is; content words: neither is, which "
    "includes parts of words and, in other languages, everything else."
)
ALPHA = 0.05
SPECIAL_TOKEN, NUMBER, FUNCTION, CONTENT = range(4)  # kinds of single tokens
_FUNCTION_WORD_LIST = (
    "a about above across after again against all along also although am among an and another any anyone anything are "
    "around as at be because been before behind being below beneath beside between beyond both but by can cannot "
    "could despite did do does doing down during each either enough even ever every everyone everything few for from "
    "had has have having he her here hers herself him himself his how however i if in inside into is it its itself "
    "just least less many may me might mine more most much must my myself near neither never no nobody none nor not "
    "nothing of off on once one only onto or other others ought our ours ourselves out outside over own per perhaps "
    "quite rather same several shall she should since so some somebody someone something still such than that the "
    "their theirs them themselves then there these they this those though through throughout to too toward towards "
    "under unless until up upon us very was we were what whatever when where whereas whether which while who whoever "
    "whom whose why will with within without would yet you your yours yourself yourselves"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORD_LIST.split())


def pair_categories(pairs: AmplifiedPairs, given: Texts) -> Numbers:
    """(pairs,): the number of each pair's category."""
    input, output = np.divmod(pairs.keys, max(len(given.vocabulary), 1))
    kinds = token_kinds(given)
    both = np.stack([kinds[input], kinds[output]])
    functions = (both == FUNCTION).sum(0)
    fits = [
        (both == SPECIAL_TOKEN).any(0),
        input == output,
        2 * pairs.within >= pairs.occurrences,
        (both == NUMBER).any(0),
        functions == 2,
        functions == 1,
        np.ones(len(input), dtype=bool),
    ]
    found: Numbers = np.argmax(fits, 0)  # the first that fits
    return found


def token_kinds(given: Texts) -> Numbers:
    """(types,): the kind of each type of token: SPECIAL_TOKEN, NUMBER, FUNCTION or CONTENT."""
    found = np.array([_token_form_kind(token, _marks_word_starts(given)) for token in given.vocabulary], dtype=np.int64)
    for types, words in zip(given.types, given.words, strict=True):
        found[types[words == SPECIAL]] = SPECIAL_TOKEN
    return found


def describe_categories() -> str:
    """The definitions of the categories, for the report."""
    return DESCRIPTION.format(count=len(FUNCTION_WORDS))


def category_tables(lists: Mapping[str, Values], pairs: AmplifiedPairs, given: Texts, size: int) -> tuple[Table, Table]:
    """The shares of the categories among the top pairs of the first list, beside those among all pairs; the counts and
    p-values of all lists."""
    categories = pair_categories(pairs, given)
    whole = np.bincount(categories, minlength=len(CATEGORIES))
    total = len(categories)
    shown: list[tuple[Cell, ...]] = [("all pairs", *(f"{_percent(count, total)} %" for count in whole))]
    rows: list[tuple[Cell, ...]] = []
    for name, values in lists.items():
        level = ALPHA / max(1, values.shape[0] * len(CATEGORIES))
        for layer, row in enumerate(values, 1):
            top = np.bincount(categories[pairs.top(row, size)], minlength=len(CATEGORIES))
            drawn = int(top.sum())
            cells: list[Cell] = [f"layer {layer}"]
            for n, category in enumerate(CATEGORIES):
                more, fewer = draw_p_values(int(top[n]), drawn, int(whole[n]), total)
                p = min(1.0, 2 * min(more, fewer))
                sign = ("" if p > level else " (+)" if more < fewer else " (\u2212)") if drawn else ""
                cells.append(f"{_percent(top[n], drawn)} %{sign}")
                ratio = top[n] * total / (drawn * whole[n]) if drawn and whole[n] else None
                rows.append((name, layer, category, int(top[n]), drawn, int(whole[n]), total, ratio, p))
            if name == next(iter(lists)):
                shown.append(tuple(cells))
    first = next(iter(lists))
    note = (
        f"(+), (\u2212): more, or fewer, than expected of {size} pairs drawn at random from all listed pairs (p at "
        f"most {ALPHA}, hypergeometric, two-sided, Bonferroni-corrected over layers and categories). The test treats "
        "pairs as independent; pairs from the same sequences are not."
    )
    columns = ("amplified by", "layer", "category", "in the top", "top", "in all", "all")
    return (
        Table.of(
            "pair-categories",
            f"Categories of the {size} pairs amplified most by {first}, and of all listed pairs",
            dict.fromkeys(("pairs", *CATEGORIES), ""),
            shown,
            note,
        ),
        Table.of(
            "pair-categories-layers",
            "Categories of the pairs amplified most: counts, enrichment and p-values",
            {**dict.fromkeys(columns, ""), "enrichment": ".2f", "p": ".2g"},
            rows,
            "Enrichment: share in the top divided by share in all. p: two-sided, not corrected.",
            folded=True,
        ),
    )


def category_numbers(values: Values, pairs: AmplifiedPairs, given: Texts, size: int) -> dict[str, float]:
    """The share of each category among the top pairs of each layer."""
    categories = pair_categories(pairs, given)
    numbers: dict[str, float] = {}
    for n, name in enumerate(CATEGORIES):
        shares = [float((categories[pairs.top(row, size)] == n).mean()) for row in values] if len(categories) else []
        numbers |= layer_numbers(f"amplified.{name.replace(' ', '-')}", shares)
    return numbers


def _percent(count: int, whole: int) -> str:
    return f"{100 * count / whole:.1f}" if whole else "0"


def _marks_word_starts(given: Texts) -> bool:
    return any(token.startswith(BEGINS) for token in given.vocabulary)


def _token_form_kind(token: str, marked: bool) -> int:
    """The kind of a token by its form; `marked`: the tokenizer marks the tokens that start a word."""
    plain = token.lstrip("".join(BEGINS)).removeprefix(CONTINUES)
    if any(char.isdigit() for char in plain) or is_punctuation_token(token):
        return NUMBER
    starts = token.startswith(BEGINS) if marked else not token.startswith(CONTINUES)
    return FUNCTION if starts and plain.lower() in FUNCTION_WORDS else CONTENT
