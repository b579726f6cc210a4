"""The naive float64 reference: every contribution vector of a post-LN encoder layer, straight from the papers.

Row vectors; i = output token (row), j = input token (column), h = head. The papers: Kobayashi et al. 2020 (ATTN),
2021 (RES, LN, mixing ratio) and 2024 (FF by integrated gradients). Everything is written as plain loops over (i, j);
nothing here is shared with the library that it judges.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.helpers.oracle_parts import Norm, OracleLayer, deviation, integrated_gradients, normalise

NORM_SCOPES = (
    "ATTN-N",
    "ATTNRES-N",
    "ATTNRESLN-N",
    "ATTNRESLNFF-N",
    "ATTNRESLNFFRES-N",
    "ATTNRESLNFFRESLN-N",
)


class Linear(NamedTuple):
    """x -> x weight + bias."""

    weight: Tensor  # (in, out)
    bias: Tensor


@dataclass
class LayerTrace:
    """The values of one call of one layer, and its parameters: all float64, real tokens only."""

    x: Tensor  # (n, d) the layer's input
    weights: Tensor  # (H, n, n) attention probabilities
    values: Tensor  # (n, H d_h) x W_V + b_V
    pre_activation: Tensor  # (n, d_ff)
    actual: dict[str, Tensor]  # norm scope -> (n, d)
    output: Linear  # W_O, b_O
    norm1: Norm
    ff_in: Linear  # W_1, b_1
    activation: Callable[[Tensor], Tensor]  # g
    ff_out: Linear  # W_2, b_2
    norm2: Norm


def oracle(model: PreTrainedModel, encoding: Mapping[str, Tensor]) -> list[OracleLayer]:
    """Every layer's contributions for one input (batch 1); padding is neither row nor column."""
    return oracle_from_trace(trace(model, encoding))


@torch.no_grad()
def oracle_from_trace(traces: Sequence[LayerTrace]) -> list[OracleLayer]:
    """The same, from recorded values."""
    return [decompose(layer) for layer in traces]


def decompose(layer: LayerTrace) -> OracleLayer:
    """One layer: ATTN RES LN FF RES LN, each component applied to each contribution vector and to the remainder."""
    (heads, n, _), d = layer.weights.shape, layer.x.shape[1]
    width = layer.values.shape[1] // heads
    w_1, b_1 = layer.ff_in
    w_2, b_2 = layer.ff_out

    f = torch.empty(heads, n, d, dtype=torch.float64)  # f^h(x_j) = (x_j W_V^h + b_V^h) W_O^h
    for h in range(heads):
        head = slice(h * width, (h + 1) * width)
        for j in range(n):
            f[h, j] = layer.values[j, head] @ layer.output.weight[head]

    (coefficient,) = integrated_gradients(layer.activation, layer.pre_activation)
    at_zero = layer.activation(torch.zeros_like(b_1))  # g(0)
    vectors = {scope: torch.empty(n, n, d, dtype=torch.float64) for scope in NORM_SCOPES}
    bias = {scope: torch.empty(n, d, dtype=torch.float64) for scope in NORM_SCOPES}
    for i in range(n):
        s_1 = deviation(layer.actual["ATTNRES-N"][i], layer.norm1)
        s_2 = deviation(layer.actual["ATTNRESLNFFRES-N"][i], layer.norm2)
        for j in range(n):
            attn = sum((layer.weights[h, i, j] * f[h, j] for h in range(heads)), torch.zeros(d, dtype=torch.float64))
            res = attn + layer.x[i] if i == j else attn
            ln = normalise(res, layer.norm1, s_1)
            ff = (coefficient[i] * (ln @ w_1)) @ w_2
            res2 = ff + ln
            ln2 = normalise(res2, layer.norm2, s_2)
            for scope, vector in zip(NORM_SCOPES, (attn, res, ln, ff, res2, ln2), strict=True):
                vectors[scope][i, j] = vector

        attn = res = layer.output.bias
        ln = normalise(res, layer.norm1, s_1) + layer.norm1.beta
        ff = (coefficient[i] * (ln @ w_1 + b_1)) @ w_2 + b_2 + at_zero @ w_2
        res2 = ff + ln
        ln2 = normalise(res2, layer.norm2, s_2) + layer.norm2.beta
        for scope, vector in zip(NORM_SCOPES, (attn, res, ln, ff, res2, ln2), strict=True):
            bias[scope][i] = vector
    return OracleLayer(layer.weights, f.norm(dim=-1), vectors, bias, dict(layer.actual))


class Paths(NamedTuple):
    """Paths of the parts of a layer, relative to the layer; `layers` is a pattern for the paths of the layers."""

    layers: str
    attention: str  # the module that returns (output, probabilities)
    value: str
    output: str
    norm1: str
    ff_in: str
    activation: str
    ff_out: str
    norm2: str


BERT = Paths(
    layers=r"encoder\.layer\.\d+",
    attention="attention.self",
    value="attention.self.value",
    output="attention.output.dense",
    norm1="attention.output.LayerNorm",
    ff_in="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    ff_out="output.dense",
    norm2="output.LayerNorm",
)
PATHS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), BERT),
    "mpnet": BERT._replace(
        attention="attention.attn",
        value="attention.attn.v",
        output="attention.attn.o",
        norm1="attention.LayerNorm",
    ),
    "distilbert": Paths(
        layers=r"transformer\.layer\.\d+",
        attention="attention",
        value="attention.v_lin",
        output="attention.out_lin",
        norm1="sa_layer_norm",
        ff_in="ffn.lin1",
        activation="ffn.activation",
        ff_out="ffn.lin2",
        norm2="output_layer_norm",
    ),
    "albert": Paths(
        layers=r"encoder\.albert_layer_groups\.\d+\.albert_layers\.\d+",
        attention="attention",
        value="attention.value",
        output="attention.dense",
        norm1="attention.LayerNorm",
        ff_in="ffn",
        activation="activation",
        ff_out="ffn_output",
        norm2="full_layer_layer_norm",
    ),
}


@torch.no_grad()
def trace(model: PreTrainedModel, encoding: Mapping[str, Tensor]) -> list[LayerTrace]:
    """Run a copy of the model with eager attention and record each layer call, in order of execution."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    paths = PATHS[model.config.model_type]
    records: list[dict[str, Any]] = []  # one per layer call: a shared layer (ALBERT) is called several times

    def recorder(name: str, layer: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            if name == "value":  # the first of these modules to run
                records.append({"layer": layer})
            if name == "attention":
                records[-1]["weights"] = output[1]
            else:  # lists, because feed-forward chunking calls a module once per chunk of the sequence
                records[-1].setdefault(f"{name}.in", []).append(inputs[0])
                records[-1].setdefault(f"{name}.out", []).append(output)

        return record

    for path, layer in model.base_model.named_modules():
        if re.fullmatch(paths.layers, path):
            for name in ("attention", "value", "output", "norm1", "ff_in", "ff_out", "norm2"):
                layer.get_submodule(getattr(paths, name)).register_forward_hook(recorder(name, layer))
    model.base_model(**encoding, output_attentions=True)
    model.double()  # now the parameters are float64 too

    ids = encoding["input_ids"]
    keep = encoding.get("attention_mask", torch.ones_like(ids))[0].bool()

    def real(record: dict[str, Any], name: str) -> Tensor:
        """The recorded (1, n, d) value at the real tokens."""
        return torch.cat(record[name], dim=1)[0, keep].double()

    def linear(module: Any) -> Linear:
        return Linear(module.weight.T, module.bias)

    def norm(module: Any) -> Norm:
        return Norm(module.weight, module.bias, module.eps)

    points = ("output.out", "norm1.in", "norm1.out", "ff_out.out", "norm2.in", "norm2.out")
    traces = []
    for record in records:
        part = {name: record["layer"].get_submodule(path) for name, path in paths._asdict().items() if name != "layers"}
        traces.append(
            LayerTrace(
                x=real(record, "value.in"),
                weights=record["weights"][0][:, keep][:, :, keep].double(),
                values=real(record, "value.out"),
                pre_activation=real(record, "ff_in.out"),
                actual={scope: real(record, point) for scope, point in zip(NORM_SCOPES, points, strict=True)},
                output=linear(part["output"]),
                norm1=norm(part["norm1"]),
                ff_in=linear(part["ff_in"]),
                activation=part["activation"],
                ff_out=linear(part["ff_out"]),
                norm2=norm(part["norm2"]),
            )
        )
    return traces
