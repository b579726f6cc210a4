"""Questions whose sources are known: a context of short sentences, one or several of which hold the answer.

Every needle is paraphrased, so that copying a phrase of the question does not find it, and stands beside a decoy: the
same sentence about someone else. The decoy stands before and after the needle equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

PEOPLE = ("Maria", "Tom", "Anna", "Peter", "Lucy", "David", "Emma", "James", "Sarah", "Paul")
PLACES = ("kitchen", "garden", "bedroom", "garage", "attic", "office", "library", "basement", "bathroom", "hall")
THINGS = ("key", "book", "hat", "coin", "lamp", "ring", "map", "cup", "watch", "box")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
FILLERS = (
    "The weather was mild for most of the week.",
    "A train passes through the village twice a day.",
    "Nobody remembers who painted the old fence.",
    "The baker sells fresh bread every morning.",
    "It takes an hour to walk to the river.",
    "The school was closed because of the snow.",
    "Several birds were sitting on the roof.",
    "The market opens at eight on Saturdays.",
    "A letter arrived late in the afternoon.",
    "The road to the coast is being repaired.",
)


@dataclass(frozen=True)
class Question:
    """A context of sentences, a question, and the sentences that answer it."""

    name: str
    kind: str
    sentences: tuple[str, ...]
    question: str  # up to where the answer begins
    answer: str  # with its leading space
    gold: tuple[int, ...]  # indices of the sentences that hold the answer
    decoys: tuple[int, ...] = ()
    decoy_first: bool = False
    wrong: str = ""  # what the decoy says
    prefix: str = ""  # before the first sentence, such as a token that starts every text

    def text(self, kept: Sequence[int] | None = None) -> str:
        """The prompt, with some sentences only."""
        chosen = range(len(self.sentences)) if kept is None else sorted(kept)
        return self.prefix + "\n".join([*(self.sentences[n] for n in chosen), self.question])

    def spans(self) -> tuple[tuple[int, int], ...]:
        """The characters of each sentence in the whole prompt."""
        found, start = [], len(self.prefix)
        for sentence in self.sentences:
            found.append((start, start + len(sentence)))
            start += len(sentence) + 1
        return tuple(found)


def needle(random: Random, name: str, fillers: int, decoy_first: bool) -> Question:
    """Where somebody's thing is; the decoy is somebody else's."""
    (who, other), (place, elsewhere) = random.sample(PEOPLE, 2), random.sample(PLACES, 2)
    thing = random.choice(THINGS)
    right = f"{who} has put away the {thing} in the {place}."
    decoy = f"{other} has put away the {thing} in the {elsewhere}."
    question = f"Question: In which room can {who} find the {thing}?\nAnswer: In the"
    return _assemble(random, name, "needle", [right], [decoy], question, place, elsewhere, fillers, decoy_first)


def two_hops(random: Random, name: str, fillers: int, decoy_first: bool) -> Question:
    """Where the thing is that somebody owns: two sentences, and two about somebody else's thing."""
    (who, other), (place, elsewhere) = random.sample(PEOPLE, 2), random.sample(PLACES, 2)
    mine, others = random.sample(THINGS, 2)
    right = [f"{who} owns the {mine}.", f"The {mine} is in the {place}."]
    decoy = [f"{other} owns the {others}.", f"The {others} is in the {elsewhere}."]
    question = f"Question: In which room is the thing that {who} owns?\nAnswer: In the"
    return _assemble(random, name, "two hops", right, decoy, question, place, elsewhere, fillers, decoy_first)


def variables(random: Random, name: str, fillers: int, decoy_first: bool) -> Question:
    """A chain of assignments, and a chain of other variables."""
    a, b, c, d = random.sample("ABCDEFGHKLMNPRSTUVWXYZ", 4)
    value, other = random.sample(range(10, 100), 2)
    right = [f"VAR {a} = {value}.", f"VAR {b} = VAR {a}."]
    decoy = [f"VAR {c} = {other}.", f"VAR {d} = VAR {c}."]
    question = f"Question: What is the value of VAR {b}?\nAnswer: VAR {b} ="
    return _assemble(random, name, "variables", right, decoy, question, str(value), str(other), fillers, decoy_first)


def _assemble(
    random: Random,
    name: str,
    kind: str,
    right: list[str],
    decoy: list[str],
    question: str,
    answer: str,
    wrong: str,
    fillers: int,
    decoy_first: bool,
) -> Question:
    """Put the sentences between others, each chain in its order."""
    chains = [*decoy, *right] if decoy_first else [*right, *decoy]
    order = sorted(random.sample(range(fillers + len(chains)), len(chains)))
    between = iter(random.sample(FILLERS, fillers))
    placed = dict(zip(order, chains, strict=True))
    sentences = tuple(placed[n] if n in placed else next(between) for n in range(fillers + len(chains)))
    gold, decoys = (tuple(sentences.index(one) for one in chain) for chain in (right, decoy))
    return Question(name, kind, sentences, question, f" {answer}", gold, decoys, decoy_first, f" {wrong}")


KINDS: dict[str, Callable[[Random, str, int, bool], Question]] = {
    "needle": needle,
    "two hops": two_hops,
    "variables": variables,
}


def questions(count: int, seed: int = 0, fillers: int = 4, kinds: Sequence[str] = tuple(KINDS)) -> list[Question]:
    """`count` questions of each kind; the decoy comes first in every other one. A longer list begins with a shorter."""
    found = []
    for n in range(count):
        for kind in kinds:
            name = f"{kind}-{n}"
            found.append(KINDS[kind](Random(f"{seed} {name}"), name, fillers, n % 2 == 1))
    return found


def with_prefix(question: Question, prefix: str) -> Question:
    """The question with text before it that belongs to no sentence."""
    return replace(question, prefix=prefix)
