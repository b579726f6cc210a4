"""Explanation: what every token of an answer rests on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from normscope.errors import NormscopeError
from normscope.explain.groups import GroupedScores, SourceShares, SpelledText, TokenGroup, group_tokens, sum_groups
from normscope.explain.hops import Hop
from normscope.explain.saving import load_explanation, save_explanation
from normscope.flow.score_result import ScoreResult
from normscope.frames import frame_of
from normscope.inputs.item import ANSWER
from normscope.labels import Label, source_labels
from normscope.measures.source_share import source_share

if TYPE_CHECKING:
    import pandas
    import polars
    from matplotlib.axes import Axes

PROMPT = "(prompt)"  # the source of all tokens before the answer, if no sources were given
FIRST = "(first token)"
NOTHING = "(no input)"


class Alternative(NamedTuple):
    """A token that could have been written instead."""

    token: str
    probability: float


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(ScoreResult):
    """The tokens of an answer by input token: ``scores.sum(-1) + remainder = values`` for every token.

    Rows are the tokens of the answer; columns are all tokens that the model read, those of the answer included, in the
    order of `Flow.columns`. What is explained of each token, such as its logit minus the runner-up's, is in `targets`.
    """

    answer: str
    rows: tuple[Label, ...]  # the tokens of the answer
    columns: tuple[Label, ...]
    targets: tuple[str, ...]  # what is explained of each token
    scores: Tensor  # (answer tokens, input tokens), signed
    values: Tensor  # (answer tokens,), float64: the targets as the model computed them
    remainder: Tensor  # (answer tokens,), float64: from biases and frozen constants, attributed to no token
    completeness: Tensor  # (answer tokens,): |sum of scores + remainder - value| / max(|value|, sum of |scores|)
    probabilities: Tensor  # (answer tokens,), float64: of each token, given the tokens before
    alternatives: tuple[tuple[Alternative, ...], ...]  # for each token, the most probable ones, the largest first
    sources: Mapping[str, tuple[int, ...]]  # the columns of each source
    texts: Mapping[str, SpelledText]  # the text of each side, by token
    hops: tuple[Hop, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of the answer."""
        return tuple(label.token for label in self.rows)

    @property
    def input_tokens(self) -> tuple[str, ...]:
        """The tokens that the model read, one for each column."""
        return tuple(label.token for label in self.columns)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to read this explanation with care. Usually empty."""
        return tuple(self.info.get("warnings", ()))

    @property
    def value(self) -> float:
        """The sum of the targets of all tokens of the answer."""
        return float(self.values.sum())

    @property
    def by_source(self) -> dict[str, float]:
        """The answer by source: the sum of the scores of the source's tokens over all tokens of the answer.

        Without sources, "(prompt)" and "(answer)", which is the answer so far; with sources, also "(rest)": tokens of
        no source. The sum and `remainder.sum()` are `value`.
        """
        total = self.scores.double().sum(0)
        return {name: float(total[list(columns)].sum()) for name, columns in self.sources.items()}

    @property
    def shares(self) -> dict[str, float]:
        """`by_source` with the first token of the text apart ("(first token)", on which models rest much without
        reading it), and with the remainder as "(no input)". The parts add up to `value`."""
        total = self.scores.double().sum(0)
        first = next(n for n, label in enumerate(self.columns) if label.side == self.rows[0].side)
        found = {name: float(total[[k for k in columns if k != first]].sum()) for name, columns in self.sources.items()}
        return found | {FIRST: float(total[first]), NOTHING: float(self.remainder.sum())}

    def grouped(self, answer: str = "token", inputs: str = "source") -> GroupedScores:
        """The scores added up over parts of the answer and of the input. The frames of a sound are words of 0.1 s and
        sentences of 0.5 s.

        Args:
            answer: "token", "word", "sentence" or "line".
            inputs: One of these, or "source".

        Returns:
            The groups of both, and their scores.
        """
        rows = group_tokens(self.rows, self.texts, answer)
        if inputs == "source":
            columns = tuple(TokenGroup(name, places) for name, places in self.sources.items())
        else:
            columns = group_tokens(self.columns, self.texts, inputs)
        remainders = sum_groups(self.remainder[:, None], rows, (TokenGroup(NOTHING, (0,)),))[:, 0]
        return GroupedScores(rows, columns, sum_groups(self.scores, rows, columns), remainders)

    def source_shares(self, answer: str = "word") -> SourceShares:
        """For an encoder-decoder: how much of each written word comes from the source, and how much from the target
        text so far. ``source + prefix + remainders`` are what is explained of the word.

        With ``explain(..., against=None)``, that is the sum of the logits of its tokens: choose it to compare words or
        translations. The default contrast says why this token and not the runner-up, which the source often favours
        just as much. `Flow.source_share` has the same share by the norms of the states, or by ALTI+.

        Args:
            answer: "word", "token", "sentence" or "line".

        Returns:
            The parts of the answer, their shares (0 to 1), and the signed sums.

        Raises:
            NormscopeError: If the model has one side only.
        """
        if self.rows[0].side == self.columns[-1].side:
            raise NormscopeError("Only an explanation of an encoder-decoder has a source and a target text.")
        found = self.grouped(answer, "token")
        source = source_labels(self.columns)
        from_source = found.scores[:, source].sum(-1)
        prefix = found.scores.sum(-1) - from_source
        return SourceShares(found.rows, source_share(found.scores, source), from_source, prefix, found.remainders)

    def to_pandas(self) -> pandas.DataFrame:
        """A long table with a row for every token of the answer and of the input.

        Raises:
            NormscopeError: If pandas is not installed (``pip install 'normscope[frames]'``).
        """
        made: pandas.DataFrame = frame_of("pandas", self._table())
        return made

    def to_polars(self) -> polars.DataFrame:
        """As `to_pandas`, with polars."""
        made: polars.DataFrame = frame_of("polars", self._table())
        return made

    def _table(self) -> dict[str, list[Any]]:
        names = {k: name for name, columns in self.sources.items() for k in columns}
        cells = [(row, n, column) for row in self.rows for n, column in enumerate(self.columns)]
        return {
            "answer_position": [row.position for row, _, _ in cells],
            "answer_token": [row.token for row, _, _ in cells],
            "input_side": [column.side for _, _, column in cells],
            "input_position": [column.position for _, _, column in cells],
            "input_token": [column.token for _, _, column in cells],
            "source": [names[n] for _, n, _ in cells],
            "score": self.scores.double().flatten().tolist(),
        }

    def plot(self, *, ax: Axes | None = None, image: Any = None) -> Axes:
        """Draw the scores of the answer's tokens by source, or by word of the input if there are no named sources.
        Above them, the scores of the patches of pictures for the whole answer.

        Args:
            ax: Axes to draw the scores by source into; by default those of a new figure.
            image: The picture to draw the patches over: a path, a PIL image or an array; of several, a list.

        Returns:
            The axes; the figure is their `.figure`: ``told.plot().figure.savefig("told.pdf")``.

        Raises:
            NormscopeError: If matplotlib is not installed (``pip install 'normscope[plot]'``).
        """
        from normscope.view.figure.explanation import plot_explanation

        return plot_explanation(self, ax, image)

    def _save(self, path: str | os.PathLike[str]) -> Path:
        return save_explanation(path, self)

    @classmethod
    def _load(cls, path: str | os.PathLike[str]) -> Explanation:
        return load_explanation(path, cls, Alternative)

    def _page_body(self) -> str:
        from normscope.view.explanation_page import explanation_html

        return explanation_html(self)

    def __repr__(self) -> str:
        answer = " ".join(self.answer.split())
        short = answer if len(answer) <= 60 else f"{answer[:59]}…"
        sources = ", ".join(name for name in self.sources if name != ANSWER)
        return f"Explanation({short!r}, {len(self.rows)} tokens by {len(self.columns)}, sources: {sources})"
