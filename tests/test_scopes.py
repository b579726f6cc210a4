"""Scope names are spelled in the layer's own order; aliases name the corresponding scope of any layer."""

import pytest

from normscope import NormscopeError
from normscope.models import FAMILIES
from normscope.models.bert import BERT
from normscope.models.spec import Attention, Block, Branch, FeedForward, Norm
from normscope.scopes import aliases_of, names_of, resolve, steps_of

ATTENTION = Attention("attn", "attn.v", "attn.o")
FEED_FORWARD = FeedForward("ff.in", "ff.act", "ff.out")


def layer(*, pre: bool = False, post: bool = False, after: bool = False) -> tuple[Block, ...]:
    """Attention, then feed-forward, each with the norms asked for."""
    return tuple(
        Block(
            (Branch(op, Norm(f"pre{n}") if pre else None, Norm(f"post{n}") if post else None),),
            Norm(f"after{n}") if after else None,
        )
        for n, op in enumerate((ATTENTION, FEED_FORWARD))
    )


POST = (
    "ATTN-W",
    "ATTN-N",
    "ATTNRES-W",
    "ATTNRES-N",
    "ATTNRESLN-N",
    "ATTNRESLNFF-N",
    "ATTNRESLNFFRES-N",
    "ATTNRESLNFFRESLN-N",
)
PRE = (
    "ATTN-W",
    "LNATTN-N",
    "LNATTNRES-W",
    "LNATTNRES-N",
    "LNATTNRESLN-N",
    "LNATTNRESLNFF-N",
    "LNATTNRESLNFFRES-N",
)
SANDWICH = (
    "ATTN-W",
    "LNATTN-N",
    "LNATTNLN-N",
    "LNATTNLNRES-W",
    "LNATTNLNRES-N",
    "LNATTNLNRESLN-N",
    "LNATTNLNRESLNFF-N",
    "LNATTNLNRESLNFFLN-N",
    "LNATTNLNRESLNFFLNRES-N",
)
BARE = ("ATTN-W", "ATTN-N", "ATTNRES-W", "ATTNRES-N", "ATTNRESFF-N", "ATTNRESFFRES-N")
LAYERS = {
    "post": (layer(after=True), POST),
    "pre": (layer(pre=True), PRE),
    "sandwich": (layer(pre=True, post=True), SANDWICH),
    "bare": (layer(), BARE),
}
ALIASES = ("weights", "attention", "attention-residual", "attention-block", "ff", "ff-residual", "layer")
MEANT = {
    "post": (POST[0], POST[1], POST[3], POST[4], POST[5], POST[6], POST[7]),
    "pre": (PRE[0], PRE[1], PRE[3], PRE[3], PRE[5], PRE[6], PRE[6]),
    "sandwich": (SANDWICH[0], SANDWICH[1], SANDWICH[4], SANDWICH[4], SANDWICH[6], SANDWICH[8], SANDWICH[8]),
    "bare": (BARE[0], BARE[1], BARE[3], BARE[3], BARE[4], BARE[5], BARE[5]),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_names(kind: str) -> None:
    blocks, names = LAYERS[kind]
    assert names_of(blocks) == names


@pytest.mark.parametrize("kind", LAYERS)
def test_aliases(kind: str) -> None:
    assert aliases_of(LAYERS[kind][0]) == dict(zip(ALIASES, MEANT[kind], strict=True))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_the_papers_names(family: object) -> None:
    assert names_of(family.blocks) == POST  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", LAYERS)
def test_every_block_opens_once(kind: str) -> None:
    """The residual connection of a block starts before its first component."""
    steps = steps_of(LAYERS[kind][0])
    assert [step.opens for step in steps].count(True) == 2
    assert steps[0].opens
    for n, step in enumerate(steps):
        if step.opens and n:
            assert isinstance(steps[n - 1].part, Norm) or steps[n - 1].part is None


def test_attention_of_a_pre_norm_layer_starts_afresh() -> None:
    """The norm before attention is inside the values, so it is no scope; the one before the feed-forward is."""
    steps = steps_of(layer(pre=True))
    assert steps[0].norms is None
    assert [step.norms for step in steps if step.part == Norm("pre1")] == ["LNATTNRESLN-N"]


@pytest.mark.parametrize("kind", LAYERS)
def test_resolve_accepts_any_case_and_alias(kind: str) -> None:
    blocks, names = LAYERS[kind]
    assert resolve(None, blocks) == names
    for name in names:
        assert resolve(name.lower(), blocks) == resolve([f" {name.title()} "], blocks) == (name,)
    for alias, name in aliases_of(blocks).items():
        assert resolve(alias.upper(), blocks) == (name,)
    assert resolve(reversed(names), blocks) == names


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("ATTNRESL-N", "'ATTNRESLN-N'"),
        ("atn-n", "'ATTN-N'"),
        ("layers", "'layer'"),
        ("attention-blok", "'attention-block'"),
    ],
)
def test_unknown_scope_names_the_nearest(wanted: str, near: str) -> None:
    with pytest.raises(NormscopeError) as caught:
        resolve(["ATTN-W", wanted], BERT.blocks)
    message = str(caught.value)
    assert repr(wanted) in message
    assert near.lower() in message.split("This model has")[0].lower()
    assert all(name in message for name in POST)


def test_unknown_scope_that_is_near_to_nothing() -> None:
    with pytest.raises(NormscopeError) as caught:
        resolve("qqq", BERT.blocks)
    assert "Did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in POST)


@pytest.mark.parametrize("wanted", [[], (), iter([]), [None], [3], 5, [["ATTN-N"]], b"ATTN-N"])
def test_what_is_no_scope_is_refused(wanted: object) -> None:
    with pytest.raises(NormscopeError):
        resolve(wanted, BERT.blocks)  # type: ignore[arg-type]
