"""What came of a case."""

import re
from dataclasses import dataclass, field

RIGHT, REFUSED, WARNED, FAILED = "right", "refused", "warned", "failed"


@dataclass
class Outcome:
    """`kind` is right, refused, warned (a result with the library's warning that it is only nearly complete) or failed;
    `why` the refusal's message, or what was wrong."""

    seed: int
    kind: str
    why: str
    model: str  # family, head, precision
    attacks: dict[str, str] = field(default_factory=dict)  # name -> in words
    call: str = ""  # the requested call
    judged: str = ""  # the judge's answer, or why it has none

    def __str__(self) -> str:
        attacks = "; ".join(f"{name}: {said}" for name, said in self.attacks.items()) or "no attack"
        return (
            f"case {self.seed} {self.kind}: {self.model} | {attacks} | {self.call} | judge: {self.judged} | {self.why}"
        )

    def packed(self) -> tuple[int, str, str, list[str]]:
        """What a table needs, as plain values: they go from one process to another."""
        return self.seed, self.kind, self.why, list(self.attacks)

    @staticmethod
    def unpacked(seed: int, kind: str, why: str, attacks: list[str]) -> "Outcome":
        return Outcome(seed, kind, why, "", dict.fromkeys(attacks, ""))

    @property
    def group(self) -> str:
        """`why` without what differs from case to case."""
        text = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|`[^`]*`", "…", self.why.replace("'s ", "s "))
        text = re.sub(r"-?\d[\d.,e+-]*", "N", text)
        text = re.sub(r"\b(LN|RES|FF|X?ATTN)+-[NW]\b", "SCOPE", text)
        text = re.sub(
            r"\b[A-Z][A-Za-z0-9]*(Model|Layer|Block|LM\w*|Classification|Generation|Attention|MLP)\b", "CLASS", text
        )
        text = re.sub(r"\b(family|modified) [A-Z]\S*( …)?", r"\1 FAMILY", text)
        text = re.sub(r"(has no|at) \S+[.:,]", r"\1 PATH", text)
        text = re.sub(r"\S*\.N layer N", "LAYER N", text)
        text = re.sub(r"what [^,:]+ reads", "what PART reads", text)
        return re.sub(r"(encoder|decoder) N", "SIDE N", text)[:160]
