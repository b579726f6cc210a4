"""Source against target prefix, word by word: against single flows and sums by hand, in float64."""

from __future__ import annotations

import pytest
import torch

from normscope import NormscopeError
from tests.helpers.toys import PROMPT, SOURCE, TARGET, speaker, translator


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("against", [None, "runner-up"])
def test_sums_of_single_flows(name: str, against: str | None) -> None:
    lens = translator(name)
    told = lens.explain(SOURCE, text_target=TARGET, against=against)
    found = told.source_shares()
    assert [group.name for group in found.rows] == TARGET.split()
    for n in range(len(TARGET.split())):
        flow = lens.flow((SOURCE, TARGET), target=slice(n + 1, n + 2), against=against)
        own = {side: [s for s, c in zip(flow.scores.tolist(), flow.columns, strict=True) if c.side == side]
               for side in ("decoder", "encoder")}  # fmt: skip
        total = sum(map(abs, own["decoder"])) + sum(map(abs, own["encoder"]))
        assert float(found.source[n]) == pytest.approx(sum(own["encoder"]), abs=1e-10)
        assert float(found.prefix[n]) == pytest.approx(sum(own["decoder"]), abs=1e-10)
        assert float(found.shares[n]) == pytest.approx(sum(map(abs, own["encoder"])) / total, abs=1e-10)
    torch.testing.assert_close(found.source + found.prefix + found.remainders, told.values)


def test_parts_of_the_answer_add_up() -> None:
    told = translator().explain(SOURCE, text_target=TARGET, against=None)
    words, whole = told.source_shares(), told.source_shares("line")
    assert len(whole.rows) == 1
    for part in ("source", "prefix", "remainders"):
        torch.testing.assert_close(getattr(words, part).sum(), getattr(whole, part)[0])
    scores = told.scores.double().sum(0).abs()
    source = torch.tensor([label.side == "encoder" for label in told.columns])
    torch.testing.assert_close(whole.shares[0], scores[source].sum() / scores.sum())


@pytest.mark.parametrize("method", ["exact", "alti+", "rollout:layer"])
def test_the_share_of_a_flow(method: str) -> None:
    flow = translator().flow((SOURCE, TARGET), method=method)
    for layer, table in enumerate(flow.maps.tolist()):
        for row, cells in enumerate(table):
            own = sum(cell for cell, label in zip(cells, flow.columns, strict=True) if label.side == "encoder")
            assert float(flow.source_share[layer, row]) == pytest.approx(own / sum(cells))


def test_refused() -> None:
    with pytest.raises(NormscopeError, match="Only a flow of an encoder-decoder"):
        _ = speaker().flow(PROMPT).source_share
    with pytest.raises(NormscopeError, match="Only an explanation of an encoder-decoder"):
        speaker().explain(PROMPT, generate=2).source_shares()
    with pytest.raises(NormscopeError, match=r"text_target is for encoder-decoders.*answer="):
        speaker().explain(PROMPT, text_target=TARGET)
    with pytest.raises(NormscopeError, match="pass one of them"):
        translator().explain(SOURCE, text_target=TARGET, answer=TARGET)
