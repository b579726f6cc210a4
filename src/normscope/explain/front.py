"""The method `explain` of an Analyzer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from normscope.engine.request import Estimate
from normscope.engine.run import Progress
from normscope.errors import NormscopeError
from normscope.explain.answers import Question, explanation_cost, find_answers
from normscope.explain.result import Explanation
from normscope.explain.run import ExplainOptions, check_explain_options, run_explanation, steps_to_explain
from normscope.flow.run import check_flow_gate
from normscope.models.loaded import LoadedModel
from normscope.step_progress import follow_steps
from normscope.tracing.model_state import is_proved
from normscope.tracing.proof import prove


class Explains:
    """A model that explains what it writes."""

    loaded: LoadedModel

    def explain(
        self,
        prompt: Any = None,
        *,
        words: Sequence[str] | None = None,
        chat: Sequence[Mapping[str, str]] | None = None,
        sources: Any = None,
        template: str | None = None,
        generate: int | None = None,
        answer: str | None = None,
        text_target: str | None = None,
        target: Any = None,
        against: Any = "runner-up",
        hops: int = 0,
        final: str | None = None,
        alternatives: int = 5,
        gate: str = "ig",
        truncation: bool = False,
        progress: Progress | None = None,
    ) -> Explanation:
        """Explain every token of an answer: how much of it comes from each token of the prompt, from each source, from
        the answer so far, and from no input.

        The token at a position is read from the logits one position before it, so only what the model has read until
        then counts. Ctrl-C returns the tokens that are done.

        Args:
            prompt: The prompt as text, or an encoding; for an encoder-decoder, the source text.
            words: The prompt as a list of words instead.
            chat: The prompt as a conversation instead, ``[{"role": ..., "content": ...}]``.
            sources: Parts of the prompt, as for `flow`: a list or dict of texts, character spans by name, or "word",
                "sentence", "line" or "message"; `prompt` is then the question beside texts.
            template: How sources that are texts are joined, such as ``"{sources}\\n\\n{question}"``.
            generate: Explain what the model writes: at most this number of tokens, generated greedily.
            answer: Explain this text as the answer instead.
            text_target: The same for an encoder-decoder, by the name that `analyze` has for its target text.
            target: Explain a part of the prompt instead: a slice of positions or a `Passage`. For an encoder-decoder,
                a part of the target text; the prompt is then a pair.
            against: What each token's logit is contrasted with: the largest other logit at the same position
                ("runner-up"), the "mean" of all logits, a token's id, or nothing (None). Another text is an answer of
                its own: token i explains the difference of the two log-probabilities at token i. Where one answer is
                longer, its tokens stand alone; those of a longer other answer count for the last token.
            hops: The number of hops through the reasoning in the answer, see `Explanation.hops`.
            final: The piece of the answer with which its final part begins; the part before is the reasoning. Default:
                what follows "</think>".
            alternatives: The number of alternatives to each token.
            gate: How the feed-forward's activation is attributed: "ig" or "frozen", which is faster.
            truncation: Truncate a prompt that is too long instead of raising an error.
            progress: Called with the steps done and the total: tokens to write, layers to read, tokens to explain.

        Returns:
            An Explanation.

        Raises:
            NormscopeError: If the input, the sources or the answer cannot be used with this model.
        """
        check_flow_gate(gate)
        options = ExplainOptions(against, gate, alternatives, hops, final)
        check_explain_options(options)
        if not is_proved(self.loaded):
            prove(self.loaded)
        if text_target is not None:
            answer = _answer_of_target(self.loaded, answer, text_target)
        question = Question(prompt, words, chat, sources, template, truncation)
        with nullcontext() if progress is None else follow_steps(progress, steps_to_explain(self.loaded, generate)):
            answers = find_answers(self.loaded, question, generate, answer, target, against)
            return run_explanation(self.loaded, answers, options)

    def estimate_explanation(
        self,
        prompt: Any = None,
        *,
        words: Sequence[str] | None = None,
        chat: Sequence[Mapping[str, str]] | None = None,
        sources: Any = None,
        template: str | None = None,
        generate: int | None = None,
        answer: str | None = None,
        truncation: bool = False,
    ) -> Estimate:
        """Estimate the memory and time that `explain` takes with the same arguments, without running the model.

        Args:
            prompt: The prompt, as for `explain`.
            words: The prompt as a list of words instead.
            chat: The prompt as a conversation instead.
            sources: Parts of the prompt, as for `explain`.
            template: How sources that are texts are joined, as for `explain`.
            generate: The number of tokens that the model writes, if it does not stop early.
            answer: The answer as text instead.
            truncation: Truncate a prompt that is too long instead of raising an error.

        Returns:
            The number of tokens, bytes and seconds, as rough estimates.

        Raises:
            NormscopeError: As for `explain`, as far as it can be known before the model runs.
        """
        question = Question(prompt, words, chat, sources, template, truncation)
        return explanation_cost(self.loaded, question, generate, answer)


def _answer_of_target(loaded: LoadedModel, answer: str | None, text_target: str) -> str:
    """The target text of an encoder-decoder as its answer."""
    if not loaded.two_sided:
        raise NormscopeError(f"text_target is for encoder-decoders only; {loaded.family.name} is not one. Use answer=.")
    if answer is not None:
        raise NormscopeError("text_target and answer are the same: pass one of them.")
    return text_target
