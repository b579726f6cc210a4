"""The registry of methods: names and options, refused models and the reasons, and the model left unchanged."""

from __future__ import annotations

import threading

import pytest
import torch

from normscope import Analyzer
from normscope.flow.methods import METHODS
from tests.helpers.compare import refused, relative, state_of
from tests.helpers.flow_cases import POST_NORM, encoding, heads, open_case, place
from tests.helpers.tiny import ENCODER_DECODER, FAMILIES, IMAGES, tiny

REASONS = {
    "cross": "cross-attention is not in its definition",
    "pre": "only post-LN layers have",
    "post": "post-LN layers normalise",
    "one": "reads an encoder",
}


def refusal(method: str, name: str) -> str | None:
    """Why a method is not for a family."""
    two, post = name in ENCODER_DECODER, name in (*POST_NORM, "bart", "marian")
    if method in ("rollout", "alti", "value_zeroing") and two:
        return "cross"
    if method == "alti+" and not two:
        return "one"
    if method == "globenc" and (two or not post):
        return "pre" if not post else "cross"
    if method == "alti_logit" and (two or post):
        return "post" if post else "cross"
    return None


@pytest.mark.parametrize("method", [method for method in METHODS if method != "rollout-raw"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_method_on_every_family(name: str, method: str) -> None:
    """It works, or is refused with a reason; the model is unchanged."""
    lens, given, _, frozen = open_case(name, heads(name)[0])
    before = state_of(lens.model)
    reason = refusal(method, name)
    given_method = "integrated_gradients:3" if method == "integrated_gradients" else method

    def run() -> None:
        found = lens.flow(given, method=given_method, target=1, position=place(frozen))
        assert found.method == given_method
        assert found.scores.shape == (len(found.columns),)
        assert found.scores.isfinite().all()
        if METHODS[method].maps is not None:
            assert found.maps.shape == (len(found.layers), len(found.rows), len(found.columns))
            assert found.maps.isfinite().all()
            assert float(found.maps.min()) >= 0
        else:
            refused(lambda: found.maps, "no maps")

    if reason is None:
        run()
    else:
        refused(run, lens.family.name, REASONS[reason])
    assert state_of(lens.model) == before


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("exakt", ("Unknown method", "exact", "alti_logit")),
        ("", ("Unknown method",)),
        (None, ("Unknown method",)),
        ("exact:none", ("Unknown method", "Known: exact")),
        ("decompx:cls", ("decompx:absdot", "decompx:none")),
        ("globenc:N_FF", ("globenc:n_enc",)),
        ("alti_logit:ff", ("alti_logit:attention",)),
        ("integrated_gradients:0", ("number of steps",)),
        ("integrated_gradients:many", ("number of steps",)),
    ],
)
def test_unknown_methods(method: str, parts: tuple[str, ...]) -> None:
    lens, given, _, _ = open_case("gpt2", "CausalLM")
    refused(lambda: lens.flow(given, method=method, target=1), *parts)


@pytest.mark.parametrize("method", ["alti_logit", "gradient_x_input", "integrated_gradients"])
def test_methods_that_need_a_target(method: str) -> None:
    lens, given, _, _ = open_case("gpt2", "CausalLM")
    refused(lambda: lens.flow(given, method=method), "give a target")
    headless, given, _, _ = open_case("gpt2")
    refused(lambda: headless.flow(given, method=method, target=1), "no head")


@pytest.mark.parametrize("method", ["rollout", "alti", "value_zeroing"])
def test_scores_of_a_map_are_the_row_where_the_target_is_read(method: str) -> None:
    lens, given, _, _ = open_case("gpt2", "CausalLM")
    found = lens.flow(given, method=method, target=5, position=4)
    torch.testing.assert_close(found.scores, found.map[4])
    assert found.remainder != found.remainder  # nan
    first, given, _, _ = open_case("bert", "SequenceClassification")
    found = first.flow(given, method=method, target=1)
    torch.testing.assert_close(found.scores, found.map[0])
    model = tiny("modernbert", "SequenceClassification", classifier_pooling="mean")
    given = encoding("modernbert", model)
    given["attention_mask"][0, [2, 4]] = 0
    found = Analyzer(model).flow(given, method=method, target=1)
    assert relative(found.scores, found.map.mean(0)) <= 1e-9


def test_a_masked_token_has_no_row() -> None:
    lens, given, _, _ = open_case("gpt2", "CausalLM")
    given = {key: value.clone() for key, value in given.items()}
    given["attention_mask"][0, 2] = 0
    refused(lambda: lens.flow(given, method="alti", target=1, position=2), "masked")
    found = lens.flow(given, method="alti", target=1, position=3)
    torch.testing.assert_close(found.scores, found.map[2])


@pytest.mark.parametrize("method", ["exact", "value_zeroing", "gradient_x_input"])
def test_a_plain_pass_in_another_thread(method: str) -> None:
    """Neither disturbs the other: hooks act on the pass of one thread only."""
    lens, given, _, _ = open_case("gpt2", "CausalLM")
    with torch.no_grad():
        logits = lens.model(**given).logits
    scores = lens.flow(given, method=method, target=1).scores
    done, wrong = threading.Event(), []

    def passes() -> None:
        with torch.no_grad():
            while not done.is_set():
                if not torch.allclose(lens.model(**given).logits, logits, rtol=1e-6, atol=1e-6):
                    wrong.append(True)

    other = threading.Thread(target=passes)
    other.start()
    try:
        for _ in range(5):
            torch.testing.assert_close(lens.flow(given, method=method, target=1).scores, scores)
    finally:
        done.set()
        other.join()
    assert not wrong


@pytest.mark.parametrize("name", ["llama", *IMAGES])
def test_single_precision(name: str) -> None:
    model = tiny(name, heads(name)[0], dtype=torch.float32)
    lens, given = Analyzer(model), encoding(name, model)
    wide, wide_given, _, frozen = open_case(name, heads(name)[0])
    for method in ("exact", "decompx", "rollout", "alti", "alti_logit", "value_zeroing", "gradient_x_input"):
        single = lens.flow(given, method=method, target=1, position=place(frozen)).scores.double()
        double = wide.flow(wide_given, method=method, target=1, position=place(frozen)).scores
        assert relative(single, double) <= 2e-3, method
