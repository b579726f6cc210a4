"""The peers, as data: what is installed, which adapter runs, and what normscope computes beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One question put to one peer, and to normscope."""

    name: str
    question: str
    packages: tuple[str, ...]  # of the peer, pinned, installed without what they require
    extras: tuple[str, ...] = ()  # what they require and the shared environment lacks
    adapter: str = ""  # a script in `adapters`
    method: str = ""  # passed to both adapters
    ours: str = "normscope_scores"
    same: bool = True  # both define the same quantity, so the numbers must agree
    note: str = ""


CAPTUM = ("captum==0.9.0",)
INSEQ_NEEDS = ("captum==0.9.0", "jaxtyping", "wadler-lindig", "typeguard<=2.13.3", "treescope")
PEERS = (
    Peer(
        "Captum", "integrated gradients, 50 steps", CAPTUM, adapter="captum_scores", method="integrated_gradients",
        same=False, note="approximations of the same integral; normscope puts more steps where a norm changes most",
    ),
    Peer("Captum", "gradient x input", CAPTUM, adapter="captum_scores", method="gradient_x_input"),
    Peer("Inseq", "gradient x input", ("inseq==0.7.1",), INSEQ_NEEDS, "inseq_scores", "gradient_x_input"),
    Peer(
        "BertViz", "attention weights", ("bertviz==1.4.1",), ("boto3", "botocore", "jmespath", "s3transfer", "ipython"),
        "bertviz_map", "weights", ours="normscope_map",
    ),
)  # fmt: skip
