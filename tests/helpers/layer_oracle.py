"""The naive float64 reference for every kind of layer: post-LN, pre-LN, sandwich, parallel, with cross-attention.

Row vectors; i = output token (row), j = input token (column), h = head. A layer is a list of blocks
`y = after(x + sum over branches of scale * post(op(pre(x))))`. Each component is applied to every contribution vector
and to the remainder, in plain loops over (i, j), and at every scope the vectors and the remainder sum to the model's
own vector. Nothing here is shared with the library that it judges.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tests.helpers.oracle_parts import Norm, OracleLayer, deviation, integrated_gradients, normalise

Record = dict[str, tuple[Tensor, Any]]  # module path inside a layer -> its input and output


# What a layer is made of: module paths relative to the layer.


class Attention(NamedTuple):
    """Self-attention, or cross-attention to the encoder's tokens."""

    module: str  # returns a tuple that ends with the probabilities
    value: str  # the projection that computes the values, possibly with queries and keys
    output: str
    layout: str = "values"  # what `value` returns: "values"; "tail", values after q and k; "heads", q k v per head
    cross: bool = False


class FeedForward(NamedTuple):
    """act(x W_1) W_2; act(x W_g) * (x W_u) W_d with two inputs or one fused [gate, up]; or a mixture of experts."""

    inputs: tuple[str, ...]
    output: str
    activation: str  # "": silu, called as a function
    fused: bool = False
    experts: str = ""  # holds gate_up_proj and down_proj of all experts; then `output` is the whole mixture
    router: str = ""  # returns (logits, shares, indices)


class Branch(NamedTuple):
    """scale * post(op(pre(x)))."""

    op: Attention | FeedForward
    pre: str | None = None
    post: str | None = None
    scale: str | None = None


class Block(NamedTuple):
    """after(x + sum of branches)."""

    branches: tuple[Branch, ...]
    after: str | None = None


class Stack(NamedTuple):
    """The layers of one stack: a pattern for their paths in the base model, and the blocks of each."""

    layers: str
    blocks: tuple[Block, ...]


# Names in earlier versions of transformers.
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
BEFORE_VIT_LAYERS, BEFORE_DINOV2_PROJECTIONS = VERSION < (5, 9), VERSION < (5, 18)
EARLIER_ATTENTION = Attention("attention.attention", "attention.attention.value", "attention.output.dense")


def pre_ln(*branches: Branch) -> tuple[Block, ...]:
    return tuple(Block((branch,)) for branch in branches)


def describe(config: PretrainedConfig) -> dict[str, Stack]:
    """The stacks of a model, from its config."""
    kind = config.model_type
    if kind in ("bert", "roberta", "xlm-roberta", "camembert", "electra", "deberta-v2"):
        value = "attention.self.value_proj" if kind == "deberta-v2" else "attention.self.value"
        attention = Attention("attention.self", value, "attention.output.dense")
        ff = FeedForward(("intermediate.dense",), "output.dense", "intermediate.intermediate_act_fn")
        blocks = (
            Block((Branch(attention),), after="attention.output.LayerNorm"),
            Block((Branch(ff),), after="output.LayerNorm"),
        )
        return {"encoder": Stack(r"encoder\.layer\.\d+", blocks)}
    if kind == "modernbert":
        attention = Attention("attn", "attn.Wqkv", "attn.Wo", "tail")
        ff = FeedForward(("mlp.Wi",), "mlp.Wo", "mlp.act", fused=True)
        return {"encoder": Stack(r"layers\.\d+", pre_ln(Branch(attention, "attn_norm"), Branch(ff, "mlp_norm")))}
    if kind in ("vit", "deit") and BEFORE_VIT_LAYERS:
        ff = FeedForward(("intermediate.dense",), "output.dense", "intermediate.intermediate_act_fn")
        blocks = pre_ln(Branch(EARLIER_ATTENTION, "layernorm_before"), Branch(ff, "layernorm_after"))
        return {"encoder": Stack(r"encoder\.layer\.\d+", blocks)}
    if kind in ("vit", "deit"):
        attention = Attention("attention", "attention.v_proj", "attention.o_proj")
        ff = FeedForward(("mlp.fc1",), "mlp.fc2", "mlp.activation_fn")
        blocks = pre_ln(Branch(attention, "layernorm_before"), Branch(ff, "layernorm_after"))
        return {"encoder": Stack(r"layers\.\d+", blocks)}
    if kind in ("dinov2", "dinov2_with_registers"):
        attention = Attention("attention", "attention.v_proj", "attention.o_proj")
        if BEFORE_DINOV2_PROJECTIONS:
            attention = EARLIER_ATTENTION
            ff = FeedForward(("mlp.fc1",), "mlp.fc2", "mlp.activation")
            if config.use_swiglu_ffn:
                ff = FeedForward(("mlp.weights_in",), "mlp.weights_out", "", fused=True)
        elif config.use_swiglu_ffn:
            ff = FeedForward(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp.act_fn")
        else:
            ff = FeedForward(("mlp.fc1",), "mlp.fc2", "mlp.activation_fn")
        first = Branch(attention, "norm1", scale="layer_scale1")
        second = Branch(ff, "norm2", scale="layer_scale2")
        return {"encoder": Stack(r"(encoder\.layer|layers)\.\d+", pre_ln(first, second))}
    if kind == "gpt2":
        attention = Attention("attn", "attn.c_attn", "attn.c_proj", "tail")
        ff = FeedForward(("mlp.c_fc",), "mlp.c_proj", "mlp.act")
        return {"decoder": Stack(r"h\.\d+", pre_ln(Branch(attention, "ln_1"), Branch(ff, "ln_2")))}
    if kind == "gptj":
        attention = Attention("attn", "attn.v_proj", "attn.out_proj")
        ff = FeedForward(("mlp.fc_in",), "mlp.fc_out", "mlp.act")
        return {"decoder": Stack(r"h\.\d+", (Block((Branch(attention, "ln_1"), Branch(ff, "ln_1"))),))}
    if kind == "gpt_neox":
        attention = Attention("attention", "attention.query_key_value", "attention.dense", "heads")
        ff = FeedForward(("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", "mlp.act")
        branches = Branch(attention, "input_layernorm"), Branch(ff, "post_attention_layernorm")
        return {
            "decoder": Stack(r"layers\.\d+", (Block(branches),) if config.use_parallel_residual else pre_ln(*branches))
        }
    if kind == "opt":
        attention = Attention("self_attn", "self_attn.v_proj", "self_attn.out_proj")
        ff = FeedForward(("fc1",), "fc2", "activation_fn")
        norms = "self_attn_layer_norm", "final_layer_norm"
        if config.do_layer_norm_before:
            blocks = pre_ln(Branch(attention, norms[0]), Branch(ff, norms[1]))
        else:
            blocks = Block((Branch(attention),), norms[0]), Block((Branch(ff),), norms[1])
        return {"decoder": Stack(r"decoder\.layers\.\d+", blocks)}
    if kind == "t5":
        return {side: t5_stack(side, config.is_gated_act) for side in ("encoder", "decoder")}
    if kind in ("bart", "marian", "whisper"):
        return {side: bart_stack(side, before=kind == "whisper") for side in ("encoder", "decoder")}

    attention = Attention("self_attn", "self_attn.v_proj", "self_attn.o_proj")  # Llama and similar families
    ff = FeedForward(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp.act_fn")
    first = Branch(attention, "input_layernorm")
    second = Branch(ff, "post_attention_layernorm")
    if kind in ("gemma2", "gemma3_text"):
        first = Branch(attention, "input_layernorm", "post_attention_layernorm")
        second = Branch(ff, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    elif kind == "phi3":
        first = first._replace(op=Attention("self_attn", "self_attn.qkv_proj", "self_attn.o_proj", "tail"))
        second = second._replace(
            op=FeedForward(("mlp.gate_up_proj",), "mlp.down_proj", "mlp.activation_fn", fused=True)
        )
    elif kind in ("mixtral", "qwen3_moe", "gpt_oss"):
        router = "mlp.router" if kind == "gpt_oss" else "mlp.gate"
        second = second._replace(op=ff._replace(output="mlp", experts="mlp.experts", router=router))
    elif kind not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(f"no description of {kind}")
    return {"decoder": Stack(r"layers\.\d+", pre_ln(first, second))}


def t5_stack(side: str, gated: bool) -> Stack:
    last = "layer.2" if side == "decoder" else "layer.1"
    dense = f"{last}.DenseReluDense"
    own = "layer.0.SelfAttention"
    branches = [Branch(Attention(own, f"{own}.v", f"{own}.o"), "layer.0.layer_norm")]
    if side == "decoder":
        cross = "layer.1.EncDecAttention"
        branches.append(Branch(Attention(cross, f"{cross}.v", f"{cross}.o", cross=True), "layer.1.layer_norm"))
    inputs = (f"{dense}.wi_0", f"{dense}.wi_1") if gated else (f"{dense}.wi",)
    branches.append(Branch(FeedForward(inputs, f"{dense}.wo", f"{dense}.act"), f"{last}.layer_norm"))
    return Stack(rf"{side}\.block\.\d+", pre_ln(*branches))


def bart_stack(side: str, before: bool) -> Stack:
    parts: list[tuple[Attention | FeedForward, str]] = [
        (Attention("self_attn", "self_attn.v_proj", "self_attn.out_proj"), "self_attn_layer_norm")
    ]
    if side == "decoder":
        cross = Attention("encoder_attn", "encoder_attn.v_proj", "encoder_attn.out_proj", cross=True)
        parts.append((cross, "encoder_attn_layer_norm"))
    parts.append((FeedForward(("fc1",), "fc2", "activation_fn"), "final_layer_norm"))
    if before:
        return Stack(rf"{side}\.layers\.\d+", pre_ln(*(Branch(op, norm) for op, norm in parts)))
    return Stack(rf"{side}\.layers\.\d+", tuple(Block((Branch(op),), norm) for op, norm in parts))


# The algebra.


class State(NamedTuple):
    """Contributions at one point of a layer: sum_j vectors[i, j] + bias[i] = actual[i]."""

    vectors: Tensor  # (n, columns, d)
    bias: Tensor  # (n, d)
    actual: Tensor  # (n, d)


class Unit(NamedTuple):
    """One feed-forward network or expert: share * (F(x W_1 + b_1, ...) W_out + b_out)."""

    inputs: tuple[tuple[Tensor, Tensor], ...]  # W (d, d_ff) and b (d_ff) of each argument of F
    function: Callable[..., Tensor]  # elementwise
    weight: Tensor  # (d_ff, d)
    bias: Tensor  # (d,)
    share: Tensor  # (n,) its weight for each token


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def apply_norm(state: State, norm: Norm | None, actual: Tensor) -> State:
    """The norm with its statistic frozen at the real vector; `actual` is the model's own output of the norm."""
    if norm is None:
        return state._replace(actual=actual)
    vectors, bias = torch.empty_like(state.vectors), torch.empty_like(state.bias)
    for i, real in enumerate(state.actual):
        s = deviation(real, norm)
        for j in range(vectors.shape[1]):
            vectors[i, j] = normalise(state.vectors[i, j], norm, s)
        bias[i] = normalise(state.bias[i], norm, s) + norm.beta
    return State(vectors, bias, actual)


def attend(weights: Tensor, f: Tensor, bias: Tensor, columns: int, offset: int, actual: Tensor) -> State:
    """c_ij = sum_h alpha^h_ij f^h_j, with f^h_j = v^h_j W_O^h (H, n_keys, d); key j is column offset + j."""
    heads, n, keys = weights.shape
    vectors = zeros(n, columns, f.shape[-1])
    for i in range(n):
        for j in range(keys):
            for h in range(heads):
                vectors[i, offset + j] += weights[h, i, j] * f[h, j]
    return State(vectors, bias.expand(n, -1).clone(), actual)


def feed_forward(state: State, units: list[Unit], actual: Tensor) -> State:
    """Integrated gradients from zero: z_j * integral_0^1 dF/dz(t z) dt for each summand; F(0) goes to the remainder."""
    vectors, bias = torch.zeros_like(state.vectors), torch.zeros_like(state.bias)
    for unit in units:
        z = [state.actual @ weight + hidden_bias for weight, hidden_bias in unit.inputs]
        at_zero = unit.function(*(torch.zeros_like(argument[0]) for argument in z))
        paths = list(zip(integrated_gradients(unit.function, *z), unit.inputs, strict=True))
        for i in range(len(vectors)):
            if unit.share[i] == 0:
                continue
            for j in range(vectors.shape[1]):
                for coefficient, (weight, _) in paths:
                    hidden = coefficient[i] * (state.vectors[i, j] @ weight)
                    vectors[i, j] += unit.share[i] * (hidden @ unit.weight)
            hidden = at_zero.clone()
            for coefficient, (weight, hidden_bias) in paths:
                hidden += coefficient[i] * (state.bias[i] @ weight + hidden_bias)
            bias[i] += unit.share[i] * (hidden @ unit.weight + unit.bias)
    return State(vectors, bias, actual)


# From a model to its layers.


@torch.no_grad()
def oracle(model: PreTrainedModel, encoding: Mapping[str, Tensor]) -> dict[str, list[OracleLayer]]:
    """Every layer's contributions for one input (batch 1), by stack; padding is neither row nor column."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    if any(hasattr(module, "experts") for module in model.modules()):
        model.set_experts_implementation("eager")  # the default, a grouped product, refuses float64
    stacks = describe(model.config)
    layers = {
        name: [layer for path, layer in model.base_model.named_modules() if re.fullmatch(stack.layers, path)]
        for name, stack in stacks.items()
    }
    records: dict[str, list[Record]] = {
        name: [record(layer, stacks[name].blocks) for layer in layers[name]] for name in stacks
    }
    asked = ("deberta-v2", "opt", "t5")  # they return probabilities only if asked, or did so in earlier versions
    extra = {"output_attentions": True} if model.config.model_type in asked else {}
    model.base_model(**encoding, **extra)
    model.double()  # now the parameters are float64 too

    keep = {}
    for name in stacks:
        n = records[name][0][""][0].shape[-2]
        mask = "decoder_attention_mask" if name == "decoder" and len(stacks) == 2 else "attention_mask"
        ignored = mask == "attention_mask" and "input_features" in encoding  # Whisper attends to all frames
        keep[name] = encoding[mask][0].bool() if mask in encoding and not ignored else torch.ones(n, dtype=torch.bool)
    return {
        name: [
            decompose(layer, stacks[name].blocks, record, keep[name], keep.get("encoder"))
            for layer, record in zip(layers[name], records[name], strict=True)
        ]
        for name in stacks
    }


def record(layer: nn.Module, blocks: tuple[Block, ...]) -> Record:
    """Hook the parts of a layer; the returned dict fills when the model runs."""
    values: Record = {}

    def hook(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            values[path] = (args[0] if args else kwargs["hidden_states"], output)

        return keep

    def finite_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In a float32 softmax, a float64 mask of finfo.min is -inf, and a fully masked row becomes NaN."""
        for name in ("attention_mask", "mask"):
            if isinstance(kwargs.get(name), Tensor) and kwargs[name].is_floating_point():
                kwargs = kwargs | {name: kwargs[name].clamp_min(-1e30)}
        return args, kwargs

    paths = {""}
    for block in blocks:
        paths |= {block.after or ""}
        for branch in block.branches:
            op = branch.op
            paths |= {branch.pre or "", branch.post or ""}
            if isinstance(op, Attention):
                paths |= {op.module, op.value, op.output}
                layer.get_submodule(op.module).register_forward_pre_hook(finite_mask, with_kwargs=True)
            else:
                dense = dense_layer(layer, op)
                paths |= {dense.output, dense.router}
    for path in paths:
        layer.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True)
    return values


def dense_layer(layer: nn.Module, ff: FeedForward) -> FeedForward:
    """Mixture-of-experts models may also have dense layers."""
    if ff.experts and not hasattr(layer.get_submodule(ff.output), "experts"):
        return ff._replace(output="mlp.down_proj", experts="", router="")
    return ff


def first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def decompose(
    layer: nn.Module, blocks: tuple[Block, ...], record: Record, keep: Tensor, source: Tensor | None
) -> OracleLayer:
    """Walk through the blocks of one layer."""

    def before(path: str) -> Tensor:
        return rows(record[path][0], keep)

    def after(path: str) -> Tensor:
        return rows(first(record[path][1]), keep)

    x = before("")
    n, d = x.shape
    crossing = any(
        isinstance(branch.op, Attention) and branch.op.cross for block in blocks for branch in block.branches
    )
    columns = n + (int(source.sum()) if crossing and source is not None else 0)
    state = State(zeros(n, columns, d), zeros(n, d), x)
    for i in range(n):
        state.vectors[i, i] = x[i]

    scopes: dict[str, State] = {}
    seen: dict[bool, tuple[Tensor, Tensor]] = {}  # by kind of attention: probabilities, norms of f^h_j
    name = ""
    for number, block in enumerate(blocks):
        total = state
        for branch in block.branches:
            op, part = branch.op, state
            parallel = len(block.branches) > 1
            if branch.pre is not None:
                part = apply_norm(part, norm_of(layer.get_submodule(branch.pre)), after(branch.pre))
                if not (parallel and isinstance(op, FeedForward)):
                    name += "LN"
                    if number > 0:
                        scopes[name] = part
            if isinstance(op, Attention):
                weights = record[op.module][1][-1][0].double()[:, keep]
                keys = source if op.cross and source is not None else keep
                weights = weights[:, :, keys]
                f, bias = value_vectors(layer, op, record, keys, len(weights))
                part = attend(weights, f, bias, columns, n if op.cross else 0, after(op.output))
                seen[op.cross] = (weights, f.norm(dim=-1))
                name += "XATTN" if op.cross else "ATTN"
                scopes["XATTN" if op.cross else name] = part
            else:
                op = dense_layer(layer, op)
                part = feed_forward(part, units_of(layer, op, record, keep), after(op.output))
                name += "FF"
                if not parallel:
                    scopes[name] = part
            if branch.post is not None:
                part = apply_norm(part, norm_of(layer.get_submodule(branch.post)), after(branch.post))
                name += "LN"
                scopes[name] = part
            scale = 1 if branch.scale is None else layer.get_submodule(branch.scale).lambda1
            total = State(total.vectors + scale * part.vectors, total.bias + scale * part.bias, total.actual)

        # the model's own sum is what enters the next norm, or leaves the layer
        if block.after is not None:
            actual = before(block.after)
        elif block is blocks[-1]:
            actual = after("")
        else:
            actual = before(blocks[number + 1].branches[0].pre or "")
        state = total._replace(actual=actual)
        name += "RES"
        scopes[name] = state
        if block.after is not None:
            state = apply_norm(state, norm_of(layer.get_submodule(block.after)), after(block.after))
            name += "LN"
            scopes[name] = state

    return OracleLayer(
        weights=seen[False][0],
        cross_weights=seen[True][0] if crossing else None,
        value_norms=seen[False][1],
        cross_value_norms=seen[True][1] if crossing else None,
        vectors={f"{scope}-N": part.vectors for scope, part in scopes.items()},
        bias={f"{scope}-N": part.bias for scope, part in scopes.items()},
        actual={f"{scope}-N": part.actual for scope, part in scopes.items()},
    )


def rows(value: Tensor, keep: Tensor) -> Tensor:
    """(1, n, d) or (n, d) at the real tokens."""
    return value.reshape(-1, value.shape[-1])[keep].double()


def linear(module: Any) -> tuple[Tensor, Tensor]:
    """W (in, out) and b of nn.Linear, or of GPT-2's Conv1D, which stores the transpose."""
    weight = module.weight.T if isinstance(module, nn.Linear) else module.weight
    return weight, zeros(weight.shape[1]) if module.bias is None else module.bias


def norm_of(module: Any) -> Norm | None:
    if isinstance(module, nn.Identity):
        return None
    if isinstance(module, nn.LayerNorm):
        return Norm(module.weight, zeros(len(module.weight)) if module.bias is None else module.bias, module.eps, True)
    gamma = 1 + module.weight if type(module).__name__.startswith("Gemma") else module.weight
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return Norm(gamma, zeros(len(gamma)), eps, False)


def value_vectors(layer: nn.Module, op: Attention, record: Record, keys: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """f^h_j = v^h_j W_O^h (H, n_keys, d) and b_O; query head h reads key-value head h // groups."""
    weight, bias = linear(layer.get_submodule(op.output))
    width = len(weight) // heads
    values = rows(record[op.value][1], keys)
    if op.layout == "tail":  # queries, keys, values
        values = values[:, -((values.shape[1] - len(weight)) // 2) :]
    elif op.layout == "heads":
        values = values.reshape(len(values), heads, 3, width)[:, :, 2].reshape(len(values), -1)
    groups = len(weight) // values.shape[1]
    f = zeros(heads, len(values), weight.shape[1])
    for h in range(heads):
        kv = h // groups
        for j in range(len(values)):
            f[h, j] = values[j, kv * width : (kv + 1) * width] @ weight[h * width : (h + 1) * width]
    return f, bias


def units_of(layer: nn.Module, op: FeedForward, record: Record, keep: Tensor) -> list[Unit]:
    """The feed-forward network, or its experts with the routing frozen."""
    n = int(keep.sum())
    if op.experts:
        experts: Any = layer.get_submodule(op.experts)
        _, shares, indices = record[op.router][1]
        shares, indices = rows(shares, keep), rows(indices, keep)
        units = []
        for e in range(experts.num_experts):
            share = torch.stack([shares[i][indices[i] == e].sum() for i in range(n)])
            units.append(clamped_expert(experts, e, share) if hasattr(experts, "limit") else expert(experts, e, share))
        return units
    act: Any = layer.get_submodule(op.activation) if op.activation else nn.functional.silu
    inputs = tuple(linear(layer.get_submodule(path)) for path in op.inputs)
    if op.fused:
        ((weight, bias),) = inputs
        inputs = tuple(zip(weight.chunk(2, dim=1), bias.chunk(2), strict=True))
    function = act if len(inputs) == 1 else product(act)
    return [Unit(inputs, function, *linear(layer.get_submodule(op.output)), zeros(n) + 1)]


def product(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """g(a) * u."""
    return lambda a, u: act(a) * u


def expert(experts: Any, e: int, share: Tensor) -> Unit:
    gate, up = experts.gate_up_proj[e].chunk(2)
    none = zeros(len(gate))
    weight = experts.down_proj[e].T
    return Unit(((gate.T, none), (up.T, none)), product(experts.act_fn), weight, zeros(weight.shape[1]), share)


def clamped_expert(experts: Any, e: int, share: Tensor) -> Unit:
    """gpt-oss: gate and up interleaved, both clamped, (up + 1) * gate * sigmoid(alpha gate)."""

    def function(a: Tensor, u: Tensor) -> Tensor:
        a, u = a.clamp(max=experts.limit), u.clamp(-experts.limit, experts.limit)
        return (u + 1) * a * torch.sigmoid(experts.alpha * a)

    weight, bias = experts.gate_up_proj[e], experts.gate_up_proj_bias[e]
    inputs = ((weight[:, ::2], bias[::2]), (weight[:, 1::2], bias[1::2]))
    return Unit(inputs, function, experts.down_proj[e], experts.down_proj_bias[e], share)
