"""A causal language model that answers questions: which answers are right, and what it says without some sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.trust.metrics import Values, keep_probabilities
from benchmarks.trust.tasks import Question
from normscope import Analyzer
from normscope.inputs.encode import encode, forward_inputs

BATCH = 8  # prompts in a pass


@dataclass
class Asked:
    """One question to a model. `target` is the first token of the answer, whose log-probability is what counts."""

    lens: Analyzer
    question: Question
    target: int
    right: bool  # the model would write the whole answer, and the wrong answer begins with another token
    known: dict[tuple[int, ...], float]  # kept sources -> log-probability

    def log_probability(self, kept: Sequence[int]) -> float:
        """Of the answer, given the sources that are kept; every set is computed once."""
        self.prepare([kept])
        return self.known[tuple(kept)]

    def prepare(self, sets: Sequence[Sequence[int]]) -> None:
        """Compute the log-probability for several sets in batches."""
        new = list(dict.fromkeys(tuple(one) for one in sets if tuple(one) not in self.known))
        for start in range(0, len(new), BATCH):
            some = new[start : start + BATCH]
            logits = last_logits(self.lens, [self.question.text(kept) for kept in some])
            found = logits.log_softmax(-1)[:, self.target]
            self.known |= zip(some, found.tolist(), strict=True)

    @torch.no_grad()
    def soft_drop(self, token_scores: Sequence[float], share: float, draws: int, seed: int) -> float:
        """What the log-probability loses if each number of the embeddings of the context is kept with a probability
        that follows its token's score, at a fixed share kept in all (Soft-NS; with negated scores, Soft-NC)."""
        (item,) = encode(self.lens.loaded, self.question.text())
        spans = item.sides[self.lens.loaded.stacks[-1].side].spans
        assert spans is not None
        end = self.question.spans()[-1][1]
        context = [n for n, span in enumerate(spans) if span is not None and span[1] <= end and span[1] > span[0]]
        inputs = forward_inputs(self.lens.loaded, [item])
        embedded = self.lens.model.get_input_embeddings()(inputs.pop("input_ids"))
        keep = torch.ones(embedded.shape[1], dtype=embedded.dtype)
        probabilities: Values = keep_probabilities([token_scores[n] for n in context], share)
        keep[context] = torch.from_numpy(probabilities).to(keep)
        generator = torch.Generator().manual_seed(seed)
        mask = torch.bernoulli(keep[None, :, None].expand(draws, *embedded.shape[1:]), generator=generator)
        batch = {key: one.expand(draws, -1) if isinstance(one, Tensor) else one for key, one in inputs.items()}
        logits = self.lens.model(inputs_embeds=embedded * mask, **batch, logits_to_keep=1).logits[:, -1].double()
        found = logits.log_softmax(-1)[:, self.target].mean()
        return self.log_probability(range(len(self.question.sentences))) - float(found)


def ask(lens: Analyzer, question: Question) -> Asked:
    """Let the model read the question with its answer: it is right if every token of it is the model's own choice."""
    tokenizer = lens.tokenizer
    assert tokenizer is not None
    prompt, answer, wrong = (
        tokenizer(question.text() + end)["input_ids"] for end in ("", question.answer, question.wrong)
    )
    n = len(prompt)
    target, other = answer[n], wrong[n] if question.wrong else -1
    with torch.no_grad():
        logits = lens.model(input_ids=torch.tensor([answer])).logits[0]
    written = logits[n - 1 : -1].argmax(-1).tolist()
    right = answer[:n] == prompt and written == answer[n:] and target != other
    first = float(logits[n - 1].double().log_softmax(-1)[target])
    return Asked(lens, question, target, right, {tuple(range(len(question.sentences))): first})


@torch.no_grad()
def last_logits(lens: Analyzer, texts: Sequence[str]) -> Tensor:
    """(texts, vocabulary), float64: the logits of the token that follows each text."""
    items = [item for text in texts for item in encode(lens.loaded, text)]
    inputs = forward_inputs(lens.loaded, items)
    ends = inputs["attention_mask"].sum(-1) - 1  # padding is on the right
    rows, place = ends.unique(return_inverse=True)
    logits: Tensor = lens.model(**inputs, logits_to_keep=rows).logits
    return logits[torch.arange(len(items)), place].double()
