"""Only the matrix products that the factored form cannot avoid, as a lower bound on the time of an analysis.

The pass is traced as for an analysis. Each layer computes the vectors f, their Gram matrices before and after the
LayerNorm's gain, the quadratic forms of the weights with them, square roots, and five maps. Diagonal cells, means,
mixing ratios, completeness and checks of precision are left out, so only the off-diagonal cells of ATTN-W and ATTN-N
are correct; `verify` checks them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import models
from normscope import Analyzer
from normscope.decompose.state import EXTRA_VECTORS
from normscope.engine.request import steps_until
from normscope.models.registry import family_of
from normscope.models.scopes import layer_steps, scope_aliases
from normscope.tracing.build import RecordRequest
from normscope.tracing.records import AttentionRecord, LayerRecord, NormRecord
from normscope.tracing.trace import watched_pass


class Products:
    """A callable that runs a BERT model on one item, with the products of the attention-block scopes in every layer."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        config = model.config
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        self.model = model
        self.vectors = torch.zeros(heads + EXTRA_VECTORS, length, config.hidden_size)
        self.grams = torch.empty(2, length, heads, heads + EXTRA_VECTORS)
        self.forms = torch.empty(2, length, heads, length)
        self.maps = torch.empty(layers, 5, length, length)
        stack = family_of(model).stacks[-1]
        steps = steps_until(layer_steps(stack.blocks), [scope_aliases(stack.blocks)["attention-block"]])
        self.records = RecordRequest(
            stack, steps, range(layers), self._on_layer, torch.ones(1, length, dtype=torch.bool)
        )

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        watched_pass(self.model, inputs, [self.records], torch.float32)
        return self.maps

    @torch.inference_mode()
    def _on_layer(self, record: LayerRecord) -> None:
        attention, norm = record.parts[0], record.parts[-1]
        assert isinstance(attention, AttentionRecord)
        assert isinstance(norm, NormRecord)
        heads = attention.weights.shape[1]
        weights = attention.weights[0].permute(2, 0, 1)  # (j, H, i)
        f = self.vectors[:heads]
        torch.bmm(attention.values[0], attention.matrix, out=f)
        for view, (gram, form) in enumerate(zip(self.grams, self.forms, strict=True)):
            if view:
                f.mul_(norm.gain)
            torch.bmm(f.transpose(0, 1), self.vectors.permute(1, 2, 0), out=gram)
            torch.bmm(gram[..., :heads], weights, out=form)
        norms = self.forms.mul_(weights).sum(2).sqrt_().transpose(1, 2)
        maps = self.maps[record.index]
        maps[:2] = weights.mean(1).T
        maps[2:4] = norms[0]
        maps[4] = norms[1]


def verify(tolerance: float = 1e-5) -> None:
    """Raise unless the products give the off-diagonal cells of normscope's ATTN-N."""
    model, inputs = models.tiny(), models.encoding(1, 9)
    found = next(iter(Analyzer(model).stream(inputs, scopes=["ATTN-N"])))["ATTN-N"]
    others = ~torch.eye(9, dtype=torch.bool)
    torch.testing.assert_close(Products(model, 9)(inputs)[:, 2, others], found[:, others], rtol=tolerance, atol=0)
