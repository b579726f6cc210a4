"""Scope names are spelled in the layer's own order; aliases name the corresponding scope of any layer."""

import pytest

from normscope import NormscopeError
from normscope.models.causal import GPT_NEOX, GPTJ, LLAMA
from normscope.models.encoder_decoders import BART, T5, WHISPER
from normscope.models.encoders import BERT
from normscope.models.registry import FAMILIES
from normscope.models.scopes import layer_steps, resolve_scopes, scope_aliases, scope_names
from normscope.models.spec import Attention, Block, Branch, Experts, Family, FeedForward, Norm
from tests.helpers.toys import SCOPES

ATTENTION = Attention("attn", "attn.v", "attn.o")
CROSS = Attention("xattn", "xattn.v", "xattn.o", cross=True)
FEED_FORWARD = FeedForward("ff.in", "ff.act", "ff.out")
EXPERTS = Experts("ff.experts", "ff.act")
Op = Attention | FeedForward | Experts


def layer(
    *,
    pre: bool = False,
    post: bool = False,
    after: bool = False,
    scale: bool = False,
    cross: bool = False,
    feed_forward: FeedForward | Experts = FEED_FORWARD,
) -> tuple[Block, ...]:
    """Attention, perhaps cross-attention, then feed-forward, each with the requested norms."""
    ops: list[Op] = [ATTENTION, CROSS, feed_forward] if cross else [ATTENTION, feed_forward]
    return tuple(
        Block(
            (
                Branch(
                    op,
                    Norm(f"pre{n}") if pre else None,
                    Norm(f"post{n}") if post else None,
                    f"scale{n}" if scale else None,
                ),
            ),
            Norm(f"after{n}") if after else None,
        )
        for n, op in enumerate(ops)
    )


def parallel(*, pre: bool = True, after: bool = False) -> tuple[Block, ...]:
    """Attention and feed-forward of the same input."""
    branches = tuple(Branch(op, Norm(f"pre{n}") if pre else None) for n, op in enumerate((ATTENTION, FEED_FORWARD)))
    return (Block(branches, Norm("after") if after else None),)


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
AFTER = (
    "ATTN-W",
    "ATTN-N",
    "ATTNLN-N",
    "ATTNLNRES-W",
    "ATTNLNRES-N",
    "ATTNLNRESFF-N",
    "ATTNLNRESFFLN-N",
    "ATTNLNRESFFLNRES-N",
)
PARALLEL = ("ATTN-W", "LNATTN-N", "LNATTNFFRES-N")
POST_CROSS = (
    "ATTN-W",
    "ATTN-N",
    "ATTNRES-W",
    "ATTNRES-N",
    "ATTNRESLN-N",
    "XATTN-W",
    "XATTN-N",
    "ATTNRESLNXATTNRES-N",
    "ATTNRESLNXATTNRESLN-N",
    "ATTNRESLNXATTNRESLNFF-N",
    "ATTNRESLNXATTNRESLNFFRES-N",
    "ATTNRESLNXATTNRESLNFFRESLN-N",
)
PRE_CROSS = (
    "ATTN-W",
    "LNATTN-N",
    "LNATTNRES-W",
    "LNATTNRES-N",
    "LNATTNRESLN-N",
    "XATTN-W",
    "XATTN-N",
    "LNATTNRESLNXATTNRES-N",
    "LNATTNRESLNXATTNRESLN-N",
    "LNATTNRESLNXATTNRESLNFF-N",
    "LNATTNRESLNXATTNRESLNFFRES-N",
)
LAYERS = {
    "post": (layer(after=True), SCOPES),
    "pre": (layer(pre=True), PRE),
    "scaled": (layer(pre=True, scale=True), PRE),
    "experts": (layer(pre=True, feed_forward=EXPERTS), PRE),
    "sandwich": (layer(pre=True, post=True), SANDWICH),
    "bare": (layer(), BARE),
    "parallel": (parallel(), PARALLEL),
    "parallel-bare": (parallel(pre=False, after=True), ("ATTN-W", "ATTN-N", "ATTNFFRES-N", "ATTNFFRESLN-N")),
    "post-cross": (layer(after=True, cross=True), POST_CROSS),
    "pre-cross": (layer(pre=True, cross=True), PRE_CROSS),
}
ALIASES = ("weights", "attention", "attention-residual", "attention-block", "ff", "ff-residual", "layer")
MEANT = {
    "post": (SCOPES[0], SCOPES[1], SCOPES[3], SCOPES[4], SCOPES[5], SCOPES[6], SCOPES[7]),
    "pre": (PRE[0], PRE[1], PRE[3], PRE[3], PRE[5], PRE[6], PRE[6]),
    "sandwich": (SANDWICH[0], SANDWICH[1], SANDWICH[4], SANDWICH[4], SANDWICH[6], SANDWICH[8], SANDWICH[8]),
    "bare": (BARE[0], BARE[1], BARE[3], BARE[3], BARE[4], BARE[5], BARE[5]),
    "parallel": (PARALLEL[0], PARALLEL[1], *[PARALLEL[2]] * 5),
    "parallel-bare": ("ATTN-W", "ATTN-N", "ATTNFFRES-N", "ATTNFFRESLN-N", *["ATTNFFRESLN-N"] * 3),
    "post-cross": tuple(POST_CROSS[n] for n in (0, 1, 7, 8, 9, 10, 11)),
    "pre-cross": tuple(PRE_CROSS[n] for n in (0, 1, 7, 7, 9, 10, 10)),
}
MEANT["scaled"] = MEANT["experts"] = MEANT["pre"]


@pytest.mark.parametrize("kind", LAYERS)
def test_names(kind: str) -> None:
    blocks, names = LAYERS[kind]
    assert scope_names(blocks) == names


@pytest.mark.parametrize("kind", LAYERS)
def test_aliases(kind: str) -> None:
    expected = dict(zip(ALIASES, MEANT[kind], strict=True))
    if kind.endswith("cross"):
        expected["cross-attention"] = "XATTN-N"
    assert scope_aliases(LAYERS[kind][0]) == expected


HYBRID = ("MIX-W", "LNMIX-N", "LNMIXRES-N", "LNMIXRESLN-N", "LNMIXRESLNFF-N", "LNMIXRESLNFFRES-N")
KINDS = {  # of the built-in families' stacks
    **dict.fromkeys(
        ["BERT", "RoBERTa", "XLM-RoBERTa", "CamemBERT", "ELECTRA", "DistilBERT", "ALBERT", "MPNet", "DeBERTa-v2"],
        (SCOPES,),
    ),
    **dict.fromkeys(["ModernBERT", "GPT-2", "OPT", "GPT-NeoX (sequential)", "Llama", "Mistral"], (PRE,)),
    **dict.fromkeys(["Qwen2", "Qwen3", "Phi-3", "Mixtral", "Qwen3-MoE", "gpt-oss"], (PRE,)),
    **dict.fromkeys(["ViT", "DeiT", "DINOv2", "DINOv2 (SwiGLU)", "DINOv2 with registers"], (PRE,)),
    **dict.fromkeys(["EuroBERT", "RoBERTa-PreLayerNorm", "XLM-RoBERTa-XL", "ESM", "ESM (rotary)"], (PRE,)),
    **dict.fromkeys(["Llama-like", "Granite", "Arcee", "Apertus", "Gemma", "GLM", "OLMo", "StarCoder2"], (PRE,)),
    **dict.fromkeys(["StableLM (sequential)", "Nemotron", "BLOOM", "Persimmon", "GPTBigCode", "BioGPT"], (PRE,)),
    **dict.fromkeys(["DINOv3", "DINOv3 (SwiGLU)", "BEiT", "BEiT (unscaled)"], (PRE,)),
    **dict.fromkeys(["Data2Vec (vision)", "Data2Vec (vision, unscaled)", "wav2vec 2.0 (pre-LN)"], (PRE,)),
    **dict.fromkeys(["CLIP (text)", "CLIP (vision)", "SigLIP (text)", "SigLIP (vision)"], (PRE,)),
    **dict.fromkeys(["wav2vec 2.0", "Data2Vec (audio)"], (SCOPES,)),
    **dict.fromkeys(["ModernBERT (decoder)", "DeepSeek"], (PRE,)),
    **dict.fromkeys(["OPT (post-LN)", "NomicBERT"], (SCOPES,)),
    **dict.fromkeys(["GPT-NeoX", "GPT-J", "Phi", "Cohere"], (PARALLEL,)),
    **dict.fromkeys(["Gemma-2", "Gemma-3 (text)", "GLM-4"], (SANDWICH,)),
    "OLMo 2": (AFTER,),
    **dict.fromkeys(
        ["Qwen3-Next", "Qwen3.5 (text)", "Qwen3.5-MoE (text)", "Bamba", "Granite-4 hybrid", "LFM2", "LFM2-MoE"],
        (HYBRID,),
    ),
    "Mamba-2": (HYBRID[:3],),
    **dict.fromkeys(["BART", "Marian"], (SCOPES, POST_CROSS)),
    **dict.fromkeys(["Whisper", "T5", "T5 (gated)", "mBART"], (PRE, PRE_CROSS)),
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_the_papers_names(family: Family) -> None:
    assert tuple(scope_names(stack.blocks) for stack in family.stacks) == KINDS[family.name]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_every_alias(family: Family) -> None:
    for stack in family.stacks:
        crosses = stack.side == "decoder" and len(family.stacks) == 2
        aliases = scope_aliases(stack.blocks)
        assert set(aliases) == {*ALIASES, *(["cross-attention"] if crosses else [])}
        assert set(aliases.values()) <= set(scope_names(stack.blocks))
        assert aliases["layer"] == scope_names(stack.blocks)[-1]


@pytest.mark.parametrize("kind", LAYERS)
def test_every_branch_starts_once(kind: str) -> None:
    """A branch reads what entered its block: its first component starts, right after a block's end or a branch's."""
    blocks = LAYERS[kind][0]
    steps = layer_steps(blocks)
    assert [step.starts for step in steps].count(True) == sum(len(block.branches) for block in blocks)
    assert [step.role for step in steps].count("sum") == len(blocks)
    assert steps[0].starts
    for n, step in enumerate(steps):
        if step.starts:
            assert step.role in ("pre", "op")
            assert n == 0 or steps[n - 1].role in (["sum", "after"] if len(blocks) > 1 else ["op"])
    ends = [n for n, step in enumerate(steps) if step.role == "sum"]
    assert all(steps[n].part is None and not steps[n].starts for n in ends)
    assert all(step.starts for n, step in enumerate(steps) if n and steps[n - 1].role == "after")


@pytest.mark.parametrize("kind", LAYERS)
def test_roles_are_in_the_order_of_the_equation(kind: str) -> None:
    """after(x + sum over branches of scale * post(op(pre(x)))), with the parts of the spec itself."""
    expected: list[tuple[str, object]] = []
    for block in LAYERS[kind][0]:
        for branch in block.branches:
            expected += [("pre", branch.pre), ("op", branch.op), ("post", branch.post), ("scale", branch.scale)]
        expected += [("sum", ()), ("after", block.after)]
    expected = [(role, None if part == () else part) for role, part in expected if part is not None]
    assert [(step.role, step.part) for step in layer_steps(LAYERS[kind][0])] == expected


def test_attention_of_a_pre_norm_layer_starts_afresh() -> None:
    """The norm before attention is inside the values, so it is not a scope; the one before the feed-forward is."""
    steps = layer_steps(layer(pre=True))
    assert steps[0].norms is None
    assert [step.norms for step in steps if step.part == Norm("pre1")] == ["LNATTNRESLN-N"]


def test_norms_of_a_parallel_layer_are_not_scopes() -> None:
    """Both norms read the layer's input, where no tokens are mixed yet; nor does the feed-forward mix any."""
    steps = layer_steps(parallel())
    assert [step.norms for step in steps if step.role == "pre"] == [None, None]
    assert [step.norms for step in steps if step.part == FEED_FORWARD] == [None]
    assert all(step.weights is None for step in steps if step.role == "sum")


def test_weights_stop_at_the_first_residual() -> None:
    """0.5 A + 0.5 I is about self-attention: the residual connection around cross-attention has no weights."""
    for kind, (_, names) in LAYERS.items():
        weights = [name for name in names if name.endswith("-W")]
        expected = 1 + (not kind.startswith("parallel")) + kind.endswith("cross")
        assert len(weights) == expected, kind


@pytest.mark.parametrize("kind", LAYERS)
def test_resolve_accepts_any_case_and_alias(kind: str) -> None:
    blocks, names = LAYERS[kind]
    assert resolve_scopes(None, blocks) == [names]
    for name in names:
        assert resolve_scopes(name.lower(), blocks) == resolve_scopes([f" {name.title()} "], blocks) == [(name,)]
    for alias, name in scope_aliases(blocks).items():
        assert resolve_scopes(alias.upper(), blocks) == resolve_scopes([f" {alias} "], blocks) == [(name,)]
    assert resolve_scopes(reversed(names), blocks) == [names]
    assert resolve_scopes([names[-1], names[0], names[0]], blocks) == [(names[0], names[-1])]


def test_resolve_in_two_stacks() -> None:
    """An entry must name a scope of one side at least; an alias names one of each side that has it."""
    encoder, decoder = (stack.blocks for stack in BART.stacks)
    assert resolve_scopes(None, encoder, decoder) == [SCOPES, POST_CROSS]
    assert resolve_scopes("layer", encoder, decoder) == [(SCOPES[-1],), (POST_CROSS[-1],)]
    assert resolve_scopes("ATTN-N", encoder, decoder) == [("ATTN-N",), ("ATTN-N",)]
    assert resolve_scopes("cross-attention", encoder, decoder) == [(), ("XATTN-N",)]
    assert resolve_scopes(["xattn-w", "ATTNRESLNFF-N"], encoder, decoder) == [("ATTNRESLNFF-N",), ("XATTN-W",)]
    with pytest.raises(NormscopeError) as caught:
        resolve_scopes(["layer", "XATN-N"], encoder, decoder)
    assert "'XATTN-N'" in str(caught.value).split("This model has")[0]
    assert all(name in str(caught.value) for name in (*SCOPES, *POST_CROSS, *ALIASES, "cross-attention"))


@pytest.mark.parametrize("family", [WHISPER, T5], ids=lambda family: family.name)
def test_resolve_in_two_pre_norm_stacks(family: Family) -> None:
    assert resolve_scopes(None, *(stack.blocks for stack in family.stacks)) == [PRE, PRE_CROSS]


@pytest.mark.parametrize("family", [GPT_NEOX, GPTJ, LLAMA, BERT], ids=lambda family: family.name)
def test_no_cross_attention_where_there_is_none(family: Family) -> None:
    for wanted in ("cross-attention", "XATTN-N", "XATTN-W"):
        with pytest.raises(NormscopeError, match="Unknown scope"):
            resolve_scopes(wanted, family.stacks[0].blocks)


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
        resolve_scopes(["ATTN-W", wanted], BERT.stacks[0].blocks)
    message = str(caught.value)
    assert repr(wanted) in message
    assert near.lower() in message.split("This model has")[0].lower()
    assert all(name in message for name in SCOPES)


def test_unknown_scope_that_is_near_to_nothing() -> None:
    with pytest.raises(NormscopeError) as caught:
        resolve_scopes("qqq", BERT.stacks[0].blocks)
    assert "Did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in SCOPES)


@pytest.mark.parametrize("wanted", [[], (), iter([]), [None], [3], 5, [["ATTN-N"]], b"ATTN-N"])
def test_non_scopes_are_refused(wanted: object) -> None:
    with pytest.raises(NormscopeError):
        resolve_scopes(wanted, BERT.stacks[0].blocks)  # type: ignore[arg-type]
