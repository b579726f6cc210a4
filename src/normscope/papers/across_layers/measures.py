"""Corpus measures of the study across layers: how much of each input is in the states of every layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from normscope.corpus.measure_registry import Columns, Sample, corpus_measure_reachable_cells, register_measure
from normscope.errors import NormscopeError
from normscope.flow.resolve import TargetRequest
from normscope.flow.result import Flow
from normscope.flow.run import find_method, run_flow
from normscope.labels import Label
from normscope.measures.correlation import average_ranks, pearson
from normscope.measures.tokens import token_category

METHODS = ("rollout", "rollout:layer", "alti", "alti+")  # compared with the exact flow, if a model has them
KEYS = ("own", "first", "even", "other_side", "inputs", "own_in_layer", "inputs_in_layer")


@register_measure("flow", scopes=("layer",), whole=True)
def measure_exact_flow(sample: Sample) -> Columns:
    """layer, position, token, category -> shares of the input tokens in a state by the exact flow, by norm: of the own
    token, of the first, an even share, of the other side; the effective number of inputs; the same in one layer"""
    found = _exact_flow(sample)
    if found is None:
        return dict.fromkeys(("layer", "position", "token", "category", *KEYS, "completeness"), ())
    layers, rows = len(found.layers), len(found.rows)
    assert found.completeness is not None
    shares = _norm_shares(found.maps)
    alone = _norm_shares(sample.analysis["layer"])
    own = _own_columns(found.rows, found.columns)
    elsewhere = torch.tensor([label.side != found.rows[0].side for label in found.columns])
    first = shares[..., 0].clone()
    first[:, own == 0] = torch.nan  # its own state does not count
    values = {
        "own": _shares_at(shares, own),
        "first": first,
        "even": 1 / (shares > 0).sum(-1),
        "other_side": shares[..., elsewhere].sum(-1),
        "inputs": effective_inputs(shares),
        "own_in_layer": _shares_at(alone, _own_columns(sample.analysis.rows, sample.analysis.columns)),
        "inputs_in_layer": effective_inputs(alone),
    }
    tokens = [label.token for label in found.rows]
    return {
        "layer": np.repeat(np.array(found.layers, dtype=np.int16), rows),
        "position": np.tile(np.array([label.position for label in found.rows], dtype=np.int32), layers),
        "token": tokens * layers,
        "category": [token_category(token) for token in tokens] * layers,
        **{key: values[key].flatten().float().numpy() for key in KEYS},
        "completeness": np.repeat(found.completeness.numpy(), rows),
    }


@register_measure("flow_agreement", scopes=("layer",), whole=True)
def measure_flow_agreement(sample: Sample) -> Columns:
    """method, layer -> Spearman's correlation of the method's map from the input with that of the exact flow"""
    exact = _exact_flow(sample)
    if exact is None:
        return {"method": (), "layer": (), "spearman": ()}
    cells = corpus_measure_reachable_cells(sample.analysis)
    truth = average_ranks(exact.maps[:, cells])
    methods, values = [], []
    for method in METHODS:
        try:
            find_method(sample.lens.loaded, method)
        except NormscopeError:
            continue
        other = run_flow(sample.lens.loaded, sample.item, method, TargetRequest(), "ig", sample.lens.workspace)
        methods.append(method)
        values.append(pearson(truth, average_ranks(other.maps[:, cells])))
    return {
        "method": np.repeat(np.array(methods, dtype=object), len(exact.layers)),
        "layer": np.tile(np.array(exact.layers, dtype=np.int16), len(methods)),
        "spearman": torch.cat(values).numpy(),
    }


def effective_inputs(shares: Tensor) -> Tensor:
    """(...,): ``exp(-sum_k p_k log p_k)`` of shares (..., columns): how many equal inputs would spread as much."""
    found: Tensor = torch.special.entr(shares.double()).sum(-1).exp()
    return found


def _exact_flow(sample: Sample) -> Flow | None:
    """The exact flow of a sample; None for the encoder of an encoder-decoder, which is a part of its decoder's."""
    if sample.analysis.info["side"] != sample.lens.loaded.stacks[-1].side:
        return None
    return run_flow(sample.lens.loaded, sample.item, "exact", TargetRequest(), "ig", sample.lens.workspace)


def _norm_shares(maps: Tensor) -> Tensor:
    return maps.double() / maps.double().sum(-1, keepdim=True).clamp_min(1e-300)


def _own_columns(rows: Sequence[Label], columns: Sequence[Label]) -> Tensor:
    """(rows,): the column of each row's own token."""
    place = {(label.side, label.position): n for n, label in enumerate(columns)}
    return torch.tensor([place[label.side, label.position] for label in rows])


def _shares_at(shares: Tensor, columns: Tensor) -> Tensor:
    return shares.gather(2, columns[None, :, None].expand(len(shares), -1, 1))[..., 0]
