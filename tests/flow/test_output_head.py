"""Changed heads: scores equal those of autograd in the frozen model, or the head is refused."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normscope import Analyzer, NormscopeError
from normscope.flow.maps import FrozenNorm, FrozenPool, FrozenScale
from normscope.flow.output_head import freeze_with_output_head
from normscope.inputs.encode import encode
from tests.helpers.compare import refused, relative, state_of
from tests.helpers.detached import Detached
from tests.helpers.flow_cases import encoding, tolerance
from tests.helpers.tiny import GATED, tiny

Change = Callable[[Tensor], Tensor]


def more_in_one(z: Tensor) -> Tensor:
    z = z.clone()
    z[..., -1] += 50
    return z


def in_place(z: Tensor) -> Tensor:
    z[..., -1] += 50
    return z


def twice_in_one(z: Tensor) -> Tensor:
    z = z.clone()
    z[..., -1] *= 2
    return z


def held_sigmoid(z: Tensor) -> Tensor:
    """The sigmoid for autograd, with ``(g(a) - g(0)) / a`` frozen."""
    a = z.detach()
    return z * ((torch.sigmoid(a) - 0.5) / a) + 0.5


CHANGES: dict[str, Change] = {
    "constant": lambda z: z + torch.linspace(-3, 5, z.shape[-1], dtype=z.dtype),
    "constant in one": more_in_one,
    "constant in place": in_place,
    "temperature": lambda z: z / 3.7,
    "tanh": lambda z: torch.tanh(z),
    "sigmoid": held_sigmoid,
    "clamp that does nothing": lambda z: z.clamp(-1e6, 1e6),
    "factor in one": twice_in_one,
    "another order": lambda z: z.flip(-1),
    "clamp": lambda z: z.clamp(-0.1, 0.1),
    "log softmax": lambda z: z.log_softmax(-1),
    "noise": lambda z: z + 1e-3 * torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).to(z),
    "x |x|": lambda z: z * z.abs(),
    "softplus": nn.functional.softplus,
    "factor of the input": lambda z: z * z.abs().mean(),
    "factor of the row": lambda z: z * z.abs().mean(-1, keepdim=True),
    "constant of the input": lambda z: z + z.mean(tuple(range(z.dim() - 1)), keepdim=True).detach() ** 2,
}


class Step(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def parent(model: PreTrainedModel, path: str) -> tuple[Any, str]:
    above, _, name = path.rpartition(".")
    return model.get_submodule(above), name


def by_hook(model: PreTrainedModel, path: str, change: Change) -> None:
    model.get_submodule(path).register_forward_hook(lambda module, args, made: change(made))


def by_wrapper(model: PreTrainedModel, path: str, change: Change) -> None:
    module: Any = model.get_submodule(path)
    own = type(module).forward
    module.forward = types.MethodType(lambda self, x: change(own(self, x)), module)


def before(model: PreTrainedModel, path: str, change: Change) -> None:
    model.get_submodule(path).register_forward_pre_hook(lambda module, args: (change(args[0]),))


def in_a_row(model: PreTrainedModel, path: str, change: Change) -> None:
    above, name = parent(model, path)
    setattr(above, name, nn.Sequential(getattr(above, name), Step(change)).eval())


def in_two_layers(model: PreTrainedModel, path: str, change: Change) -> None:
    above, name = parent(model, path)
    own = getattr(above, name)
    width = own.weight.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.Linear(width, width).to(own.weight)
    setattr(above, name, nn.Sequential(first, Step(change), own).eval())


def by_subclass(model: PreTrainedModel, path: str, change: Change) -> None:
    own: Any = type(model)

    class Changed(own):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            made = super().forward(*args, **kwargs)
            made.logits = change(made.logits)
            return made

    model.__class__ = Changed


def to_the_states(model: PreTrainedModel, path: str, change: Change) -> None:
    def hook(module: nn.Module, args: Any, made: Any) -> Any:
        made = copy.copy(made)
        made.last_hidden_state = change(made.last_hidden_state)
        return made

    model.base_model.register_forward_hook(hook)


WAYS = {one.__name__: one for one in (by_hook, by_wrapper, before, in_a_row, in_two_layers, by_subclass, to_the_states)}
HEADS = [
    ("gpt2", "CausalLM", "lm_head", {}),
    ("llama", "CausalLM", "lm_head", {}),
    ("bert", "MaskedLM", "cls.predictions.decoder", {}),
    ("bert", "SequenceClassification", "classifier", {"num_labels": 1}),
    ("roberta", "SequenceClassification", "classifier.out_proj", {"num_labels": 5}),
    ("gpt2", "SequenceClassification", "score", {"num_labels": 2}),
    ("llama", "SequenceClassification", "score", {"num_labels": 5}),
    ("dinov2", "ImageClassification", "classifier", {"num_labels": 3}),
    ("bart", "Seq2SeqLM", "lm_head", {}),
]
# Where the head reads the last states under that name, and autograd can follow what is done to them in place.
HAS_STATES = (("gpt2", "CausalLM"), ("llama", "CausalLM"), ("bert", "MaskedLM"), ("gpt2", "SequenceClassification"))
CASES = [
    (name, head, path, options, way)
    for name, head, path, options in HEADS
    for way in WAYS
    if way != "to_the_states" or (name, head) in HAS_STATES
]
FORMS = ("constant", "constant in one", "constant in place", "temperature", "tanh", "sigmoid")


def is_known(name: str, head: str, way: str, change: str) -> bool:
    """True if the form of the change can be recognised, so that it must not be refused."""
    if change == "clamp that does nothing":
        return True
    if way == "in_two_layers":  # one row does not tell a constant from anything else
        return change in FORMS[3:]
    if name == "bart":  # its logits include a constant even before the change
        return way == "in_a_row" and change in FORMS
    return head.endswith("LM") and way in ("in_a_row", "by_subclass", "before") and change in FORMS


@pytest.mark.parametrize(("name", "head", "path", "options", "way"), CASES)
def test_right_or_refused(name: str, head: str, path: str, options: dict[str, Any], way: str) -> None:
    for change, function in CHANGES.items():
        model = tiny(name, head, **options)
        given = encoding(name, model, head)
        WAYS[way](model, path, function)
        gate = "frozen" if name in GATED else "ig"
        with torch.no_grad():
            logits = model(**given).logits
        rows = logits[0].reshape(-1, logits.shape[-1])
        row, index = len(rows) // 2, rows.shape[-1] - 1
        try:
            found = Analyzer(model).flow(given, target=index, position=row, gate=gate)
        except NormscopeError as error:
            message = str(error)
            found = None
        if found is None:
            assert not is_known(name, head, way, change)
            if change != "constant in place":  # which may change the last layer's own output
                assert "cannot be decomposed" in message
                assert "(" in message  # the class of a module
            continue
        expected = Detached(model, given, name in GATED).scores(row, index)
        sides = [side for side in ("decoder", "encoder") if side in expected]
        accuracy = 1e-5 if tolerance(name) > 1e-9 else 1e-8
        assert relative(found.scores, torch.cat([expected[side][0] for side in sides])) <= accuracy, change


@pytest.mark.parametrize(
    ("way", "change", "words"),
    [
        ("by_hook", "constant in one", "lm_head (Linear) does not output x W + b"),
        ("by_wrapper", "constant in one", "lm_head (Linear) does not output x W + b"),
        ("before", "x |x|", "between transformer.ln_f (LayerNorm) and lm_head (Linear)"),
        ("to_the_states", "noise", "between transformer.ln_f (LayerNorm) and lm_head (Linear)"),
        ("in_a_row", "x |x|", "lm_head.1 (Step) has none of the known forms"),
        ("in_two_layers", "x |x|", "lm_head.1 (Step) has none of the known forms"),
        ("by_subclass", "log softmax", "between lm_head (Linear) and the logits"),
        ("by_subclass", "constant of the input", "between lm_head (Linear) and the logits depends on the input"),
        ("in_a_row", "factor of the input", "between lm_head.0 (Linear) and lm_head.1 (Step) depends on the input"),
    ],
)
def test_the_first_unknown_step_is_named(way: str, change: str, words: str) -> None:
    model = tiny("gpt2", "CausalLM")
    WAYS[way](model, "lm_head", CHANGES[change])
    lens, given = Analyzer(model), encoding("gpt2", model)
    before = str(state_of(model))
    refused(lambda: lens.flow(given, target=1), words, "The head of", "Leave the target out")
    assert str(state_of(model)) == before
    assert lens.flow(given).maps.isfinite().all()


def test_without_a_target_no_head_is_looked_at() -> None:
    """A hook before the base model makes the whole model run."""
    model = tiny("gpt2", "CausalLM")
    given = encoding("gpt2", model)
    expected = Analyzer(model).flow(given).maps
    by_subclass(model, "", CHANGES["log softmax"])
    model.base_model.register_forward_pre_hook(lambda module, args: None)
    torch.testing.assert_close(Analyzer(model).flow(given).maps, expected)


def test_a_norm_with_a_hook() -> None:
    model: Any = tiny("llama", "CausalLM")
    model.model.norm.register_forward_hook(lambda module, args, made: made + 1)
    lens, given = Analyzer(model), encoding("llama", model)
    refused(lambda: lens.flow(given, target=1), "model.norm (LlamaRMSNorm) does not output")
    assert lens.flow(given).maps.isfinite().all()


def test_a_constant_of_one_logit_goes_to_the_remainder() -> None:
    plain = tiny("gpt2", "CausalLM")
    given = encoding("gpt2", plain)
    expected = Analyzer(plain).flow(given, target=-1)
    model = tiny("gpt2", "CausalLM")
    by_subclass(model, "", more_in_one)
    found = Analyzer(model).flow(given, target=-1)
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.value == pytest.approx(expected.value + 50)
    assert found.remainder == pytest.approx(expected.remainder + 50)


class Plus(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 50


def test_a_constant_in_a_subclass_of_linear() -> None:
    plain = tiny("bert", "SequenceClassification")
    given = encoding("bert", plain)
    expected = Analyzer(plain).flow(given, target=1)
    model: Any = tiny("bert", "SequenceClassification")
    model.classifier.__class__ = Plus
    found = Analyzer(model).flow(given, target=1)
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.remainder == pytest.approx(expected.remainder + 50)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_constant_that_the_model_names(length: int) -> None:
    """Marian's logits include a constant, which cannot be identified from one row."""
    model: Any = tiny("marian", "Seq2SeqLM")
    given = encoding("marian", model)
    given["decoder_input_ids"] = given["decoder_input_ids"][:, :length]
    given["decoder_attention_mask"] = given["decoder_attention_mask"][:, :length]
    found = Analyzer(model).flow(given, target=3)
    with torch.no_grad():
        model.final_logits_bias.zero_()
    expected = Analyzer(model).flow(given, target=3)
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.remainder - expected.remainder == pytest.approx(found.value - expected.value)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_text_of_equal_tokens(name: str) -> None:
    """Their vectors are equal at every position, and the last one is read."""
    model = tiny(name, "SequenceClassification")
    given = encoding(name, model)
    given["input_ids"][:] = 7
    lens = Analyzer(model)
    found = lens.flow(given, target=1, gate="frozen")
    expected = Detached(model, given, gated=True).scores(0, 1)["decoder"][0]
    assert relative(found.scores, expected) <= 1e-5
    (item,) = encode(lens.loaded, given)
    (pool,) = (one for one in freeze_with_output_head(lens.loaded, item).head if isinstance(one, FrozenPool))
    assert pool.weights.tolist() == [[0, 0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_pretraining_heads_are_read_at_their_tokens(name: str) -> None:
    """There, the sentence head's pooler runs before the head that is explained."""
    model = tiny(name, "PreTraining")
    plain = tiny(name, "MaskedLM")
    plain.load_state_dict(model.state_dict(), strict=False)
    given = encoding(name, model)
    found, expected = (Analyzer(one).flow(given, target=3, position=2) for one in (model, plain))
    torch.testing.assert_close(found.scores, expected.scores)
    slopes = [Analyzer(one).flow(given, target=3, position=2, method="gradient_x_input") for one in (model, plain)]
    torch.testing.assert_close(slopes[0].scores, slopes[1].scores)


def test_one_number_for_each_token() -> None:
    """ELECTRA's discriminator."""
    model = tiny("electra", "PreTraining")
    given = encoding("electra", model)
    with torch.no_grad():
        logits = model(**given).logits[0]
    for position in (0, 4):
        for method in ("exact", "decompx", "gradient_x_input"):
            found = Analyzer(model).flow(given, target=0, position=position, method=method)
            assert found.value == pytest.approx(float(logits[position]))
        found = Analyzer(model).flow(given, target=0, position=position)
        assert found.to is not None
        assert found.to.completeness <= 1e-9


METHODS = ("exact", "decompx", "rollout", "gradient_x_input", "integrated_gradients:4")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "MaskedLM"])
def test_a_model_that_returns_tuples(head: str, method: str) -> None:
    model = tiny("bert", head)
    given = encoding("bert", model, head)
    position = None if head == "SequenceClassification" else 2
    expected = Analyzer(model).flow(given, target=1, position=position, method=method)
    model.config.return_dict = False
    before = state_of(model)
    found = Analyzer(model).flow(given, target=1, position=position, method=method)
    torch.testing.assert_close(found.scores, expected.scores)
    assert state_of(model) == before


def test_a_model_that_cannot_return_tuples() -> None:
    model = tiny("gpt2", "SequenceClassification")
    given = encoding("gpt2", model)
    model.config.return_dict = False
    with pytest.raises(AttributeError):  # by itself too
        model(**given)
    refused(lambda: Analyzer(model).flow(given, target=1), "The model's own forward pass failed")


@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_two_logits_at_once(name: str) -> None:
    model = tiny(name, "QuestionAnswering")
    given = encoding(name, model)
    refused(lambda: Analyzer(model).flow(given, target=1), "start_logits and end_logits", "AutoModelFor")


def test_a_softcap_that_is_not_applied_is_not_mentioned() -> None:
    model = tiny("gemma2", "SequenceClassification", final_logit_softcapping=0.5)
    found = Analyzer(model).flow(encoding("gemma2", model), target=1)
    assert found.to is not None
    assert "softcap" not in found.to.target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_decomposition_in_another_type(dtype: torch.dtype) -> None:
    for name, head in (("bert", "MaskedLM"), ("t5", "Seq2SeqLM"), ("modernbert", "SequenceClassification")):
        model = tiny(name, head, dtype=torch.float32)
        given = encoding(name, model, head)
        found = Analyzer(model, dtype=dtype).flow(given, target=1, position=0)
        assert found.to is not None
        assert found.to.completeness <= 1e-5


def test_the_maps_of_a_head() -> None:
    model = tiny("bert", "MaskedLM")
    lens = Analyzer(model)
    (item,) = encode(lens.loaded, encoding("bert", model))
    _, activation, norm, _ = freeze_with_output_head(lens.loaded, item).head
    assert isinstance(activation, FrozenScale)
    assert isinstance(norm, FrozenNorm)
