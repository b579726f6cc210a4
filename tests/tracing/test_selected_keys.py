"""Attention over selected keys, and arguments that an attention function would ignore."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope import Analyzer, NormscopeError
from normscope.errors import NormscopeWarning
from normscope.tracing.model_state import attention_stand_in
from normscope.tracing.selected_keys import fold_selected_keys, refuse_ignored_tensors
from tests.helpers.tiny import tiny
from tests.helpers.zoo import inputs_for, tiny_model

INDICES = torch.tensor([[[0, 1], [1, 2], [0, 2]]])
ALLOWED = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_only_selected_keys_are_left(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 2, 3, 4)
    causal = torch.ones(3, 3).tril().bool()[None, None]
    mask = causal if dtype == torch.bool else torch.zeros(1, 1, 3, 3, dtype=dtype).masked_fill(~causal, -1e9)
    folded, rest = fold_selected_keys(x, x, mask, {"indices": INDICES, "scaling": 1.0})
    assert folded is not None
    left = folded if dtype == torch.bool else folded == 0
    assert torch.equal(left, causal & ALLOWED)
    assert bool(folded.float().isfinite().all())
    assert rest == {"indices": None, "scaling": 1.0}
    assert fold_selected_keys(x, x, mask, {"scaling": 1.0})[0] is mask
    with pytest.raises(NormscopeError, match="without a mask"):
        fold_selected_keys(x, x, None, {"indices": INDICES})


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_maps_have_no_keys_that_are_not_selected(implementation: str) -> None:
    """Rows attend to at most four keys, those of the model's own pass."""
    model = tiny_model("deepseek_v32")
    model.set_attn_implementation(implementation)
    assert model.config.index_topk == 4
    with pytest.warns(NormscopeWarning, match="no family"):
        lens = Analyzer(model)
    given = inputs_for(model, 9)
    for options in ({}, {"rows": [6, 8]}):
        weights = lens.analyze(given, scopes="weights", **options)["weights"]
        assert ((weights > 0).sum(-1) == torch.tensor(options.get("rows", range(9))).add(1).clamp_max(4)).all()
    flow = lens.flow(given)
    assert flow.completeness is not None
    assert float(flow.completeness.max()) < 1e-5


def test_other_threads_select_keys_too() -> None:
    model = tiny_model("deepseek_v32")
    given = inputs_for(model, 9)
    found: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.append(model(**given).logits)

    run()
    with attention_stand_in(model.base_model, None):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert torch.equal(*found)


def test_a_tensor_that_eager_attention_ignores() -> None:
    module = nn.Linear(2, 2)

    def eager(module: Any, query: Any, key: Any, value: Any, mask: Any, scale: Any = None, **kwargs: Any) -> None:
        """Reads a scale."""

    fine = {"scale": torch.ones(1), "position_ids": torch.ones(1), "own": module.weight, "number": 3, "nothing": None}
    refuse_ignored_tensors(module, eager, fine)
    with pytest.raises(NormscopeError, match="Linear passes blocks to its attention function"):
        refuse_ignored_tensors(module, eager, {"blocks": torch.ones(1)})


def test_a_model_that_passes_such_a_tensor() -> None:
    model = tiny("llama")
    attention = model.base_model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: plain(*args, **kwargs, blocks=torch.ones(1))
    with pytest.raises(NormscopeError, match="LlamaAttention passes blocks"):
        Analyzer(model)
    del attention.forward
