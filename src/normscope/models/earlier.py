"""Families whose modules had other names, or other code, in earlier versions of transformers."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.encoder_decoders import T5, T5_GATED, t5_stacks
from normscope.models.further_causal import NEMOTRON
from normscope.models.spec import Attention, Block, Branch, Family, FeedForward, Norm, Stack
from normscope.models.towers import CLIP_TEXT, CLIP_VISION, SIGLIP_TEXT, SIGLIP_VISION
from normscope.models.versions import minor_version
from normscope.models.vision import (
    BEIT,
    BEIT_UNSCALED,
    DEIT,
    DINOV2,
    DINOV2_SWIGLU,
    DINOV3,
    DINOV3_GATED,
    DINOV3_PLAIN,
    DINOV3_SWIGLU,
    REGISTERS,
    VIT,
    data2vec_stacks,
    dinov2_stacks,
)

BERT_LIKE = Attention("attention.attention", "attention.attention.value", "attention.output.dense")
VIT_STACKS = (
    Stack(
        "encoder",
        "encoder.layer.*",
        (
            Block((Branch(BERT_LIKE, pre=Norm("layernorm_before")),)),
            Block(
                (
                    Branch(
                        FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
                        pre=Norm("layernorm_after"),
                    ),
                )
            ),
        ),
    ),
)
DINOV2_STACKS = dinov2_stacks(FeedForward("mlp.fc1", "mlp.activation", "mlp.fc2"), BERT_LIKE)
SWIGLU = FeedForward("mlp.weights_in", "ACT2FN.silu", "mlp.weights_out", up="mlp.weights_in")


def _read_from_products(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """Stacks whose attention does not use the interface of transformers."""

    def changed(branch: Branch) -> Branch:
        if not isinstance(branch.op, Attention):
            return branch
        return replace(branch, op=replace(branch.op, probabilities="matmul"))

    return tuple(
        replace(stack, blocks=tuple(replace(one, branches=tuple(map(changed, one.branches))) for one in stack.blocks))
        for stack in stacks
    )


def _below(module: str, family: Family) -> Family:
    """The family with its layers below a module of the model."""
    return replace(family, stacks=tuple(replace(one, layers=f"{module}.{one.layers}") for one in family.stacks))


# The version that changed them -> the families before it, which replace those of the same names.
EARLIER = {
    "5.4.0": (
        replace(DINOV3, stacks=dinov2_stacks(DINOV3_PLAIN, layers="layer.*")),
        replace(DINOV3_SWIGLU, stacks=dinov2_stacks(DINOV3_GATED, layers="layer.*")),
    ),
    "5.6.0": (
        *(_below("text_model", family) for family in (CLIP_TEXT, SIGLIP_TEXT)),
        *(_below("vision_model", family) for family in (CLIP_VISION, SIGLIP_VISION)),
    ),
    "5.9.0": (
        replace(VIT, stacks=VIT_STACKS),
        replace(DEIT, stacks=VIT_STACKS),
        replace(BEIT, stacks=data2vec_stacks()),
        replace(BEIT_UNSCALED, stacks=data2vec_stacks(scaled=False)),
    ),
    "5.13.0": (replace(NEMOTRON, stacks=_read_from_products(NEMOTRON.stacks)),),
    "5.15.0": (
        replace(T5, stacks=t5_stacks(FeedForward("wi", "act", "wo"), probabilities="matmul")),
        replace(T5_GATED, stacks=t5_stacks(FeedForward("wi_0", "act", "wo", up="wi_1"), probabilities="matmul")),
    ),
    "5.18.0": (
        replace(DINOV2, stacks=DINOV2_STACKS),
        replace(DINOV2_SWIGLU, stacks=dinov2_stacks(SWIGLU, BERT_LIKE)),
        replace(REGISTERS, stacks=DINOV2_STACKS),
    ),
}


def families_in(installed: str, families: tuple[Family, ...]) -> tuple[Family, ...]:
    """The families as they are in a version of transformers."""
    earlier = {
        family.name: family
        for changed, some in EARLIER.items()
        if minor_version(installed) < minor_version(changed)
        for family in some
    }
    return tuple(earlier.get(family.name, family) for family in families)
