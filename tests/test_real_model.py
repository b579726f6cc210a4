"""The default model on real text."""

from __future__ import annotations

import pytest
import torch

from normscope import Analyzer, NormscopeError, default_model
from normscope.checking import check
from normscope.engine import run
from normscope.tracing import proof
from tests.oracle import maps, oracle
from tests.test_oracle import assert_close_to_oracle

TEXT = "Colin Fleming played the highway tiny soap opera."


@pytest.fixture(scope="module")
def lens() -> Analyzer:
    try:
        return Analyzer.from_pretrained(default_model.default_model_folder())
    except NormscopeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "Colin Fleming plays tennis.",
        "The quick brown fox jumps over the lazy dog near the river bank.",
        "In 1905 Albert Einstein published four papers that changed physics forever, and nobody noticed at first.",
    ],
)
def test_minilm_against_the_oracle(lens: Analyzer, text: str) -> None:
    result = lens.analyze(text)
    encoding = dict(lens.tokenizer(text, return_tensors="pt"))
    assert result.tokens == tuple(lens.tokenizer.convert_ids_to_tokens(encoding["input_ids"][0].tolist()))
    assert_close_to_oracle(result, oracle(lens.model, encoding))


def test_minilm_end_to_end_against_float64(lens: Analyzer) -> None:
    result = lens.analyze(TEXT)
    double = Analyzer.from_pretrained(default_model.default_model_folder(), dtype=torch.float64)
    exact = double.analyze(TEXT)
    assert exact["layer"].dtype == torch.float64
    encoding = dict(lens.tokenizer(TEXT, return_tensors="pt"))
    for n, layer in enumerate(oracle(double.model, encoding)):
        for scope, expected in maps(layer).items():
            torch.testing.assert_close(exact[scope][n], expected, rtol=1e-9, atol=0)
            top = expected.amax(-1, keepdim=True)
            assert float(((result[scope][n].double() - expected).abs() / top).max()) < 1e-4, scope


def test_minilm_check_passes(lens: Analyzer) -> None:
    report = check(lens)
    assert report.ok
    assert {row.scope for row in report.rows} == set(lens.analyze("Yes.").scopes)


def test_check_fails_on_a_model_that_is_not_its_family(lens: Analyzer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a hook that changes a layer's attention output breaks the decomposition."""

    monkeypatch.setattr(run, "INCOMPLETE", float("inf"))
    monkeypatch.setattr(run, "INEXACT", float("inf"))
    monkeypatch.setattr(proof, "CLOSE", float("inf"))
    dense = lens.loaded.base.encoder.layer[2].attention.output.dense
    handle = dense.register_forward_hook(lambda module, args, output: output * 1.01, prepend=True)
    try:
        assert not check(lens).ok
    finally:
        handle.remove()


def test_a_modified_layer_is_refused(lens: Analyzer) -> None:
    dense = lens.loaded.base.encoder.layer[2].attention.output.dense
    handle = dense.register_forward_hook(lambda module, args, output: output * 1.5, prepend=True)
    try:
        with pytest.raises(NormscopeError, match="layer 2"):
            lens.analyze(TEXT)
    finally:
        handle.remove()


@pytest.mark.slow
def test_long_batch_stays_exact(lens: Analyzer) -> None:
    """Long inputs in one batch: several groups, blocks and chunks, against the same inputs alone."""
    texts = [" ".join([TEXT] * times) for times in (20, 3, 11)]
    for alone, together in zip((lens.analyze(text) for text in texts), lens.stream(texts, batch_size=3), strict=True):
        for scope in alone.scopes:
            top = alone[scope].amax(-1, keepdim=True)
            assert float(((alone[scope] - together[scope]).abs() / top).max()) < 1e-4
            assert float(alone.completeness[scope].max()) < 1e-5
