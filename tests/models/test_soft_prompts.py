"""Soft prompts of peft: virtual tokens are rows and columns, or columns alone, and never left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normscope import Analysis, Analyzer, NormscopeError
from normscope.checking import check
from tests.helpers import layer_oracle
from tests.helpers.oracle_parts import maps
from tests.helpers.tiny import BERT_FAMILIES, ENCODER_DECODER, tiny

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::UserWarning:torch")

IDS = torch.tensor([[5, 9, 33, 7, 21, 40, 12]])
MASK = torch.ones_like(IDS)
PROMPT = ["[prompt 1]", "[prompt 2]", "[prompt 3]"]
CAUSAL = ("llama", "gpt2", "gpt_neox", "opt", "mistral", "qwen2", "gemma2", "mixtral")
ENCODERS = ("bert", "roberta")


def config_of(kind: str, task: str) -> Any:
    if kind == "prompt tuning":
        return peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3)
    if kind == "P-tuning":
        return peft.PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=8)
    if kind == "adaption prompt":
        return peft.AdaptionPromptConfig(task_type=task, adapter_len=3, adapter_layers=1)
    return peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3)


def prompted(name: str, kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model with a soft prompt far from zero."""
    if name in BERT_FAMILIES:
        model, task = tiny(name, "SequenceClassification"), "SEQ_CLS"
    elif name in ENCODER_DECODER:
        model, task = tiny(name, "Seq2SeqLM"), "SEQ_2_SEQ_LM"
    else:
        model, task = tiny(name, "CausalLM"), "CAUSAL_LM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = peft.get_peft_model(model, config_of(kind, task))
        with torch.no_grad():
            for path, parameter in made.named_parameters():
                if "prompt" in path or "adaption" in path:
                    parameter.copy_(torch.randn_like(parameter))
    return made.to(dtype).eval()


def embedded(model: Any) -> dict[str, Tensor]:
    """The input of the base model: the prompt before the embeddings of the text."""
    prompt = model.get_prompt(1).detach()[:, :3]
    both = torch.cat([prompt, model.word_embeddings(IDS).detach()], dim=1)
    return {"inputs_embeds": both, "attention_mask": torch.ones(both.shape[:2], dtype=torch.long)}


def texts(labels: Any) -> list[str]:
    return [label[0] for label in labels]


@pytest.mark.parametrize("kind", ["prompt tuning", "P-tuning"])
@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS])
def test_virtual_tokens_are_rows_and_columns(name: str, kind: str) -> None:
    model = prompted(name, kind)
    lens = Analyzer(model)
    result = lens.analyze({"input_ids": IDS})
    assert texts(result.columns)[:3] == texts(result.rows)[:3] == PROMPT
    ((_, expected),) = layer_oracle.oracle(model.get_base_model(), embedded(model)).items()
    for n, layer in enumerate(expected):
        for scope, values in maps(layer).items():
            torch.testing.assert_close(result[scope][n], values, rtol=2e-6, atol=2e-6)
    # A batch is padded after the text; a flow begins at the virtual tokens too.
    short, whole = lens.stream([{"input_ids": IDS[:, :4]}, {"input_ids": IDS, "attention_mask": MASK}])
    torch.testing.assert_close(whole["layer"], result["layer"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(short["layer"], lens.analyze({"input_ids": IDS[:, :4]})["layer"], rtol=1e-6, atol=1e-6)
    flow = lens.flow({"input_ids": IDS}, target=1)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    assert flow.to is not None
    assert flow.to.value == pytest.approx(float(logits.flatten(0, -2)[-1, 1]), abs=1e-6)
    assert flow.to.completeness < 1e-6
    assert texts(flow.columns)[:3] == PROMPT


@pytest.mark.parametrize("name", [*CAUSAL, "bert"])
def test_a_prefix_is_columns_without_rows(name: str) -> None:
    model = prompted(name, "prefix tuning")
    lens = Analyzer(model)
    result: Analysis = lens.analyze({"input_ids": IDS}, heads=True)
    assert result["layer"].shape[1:] == (7, 10)
    assert texts(result.columns)[7:] == PROMPT
    assert texts(result.rows) == texts(result.columns)[:7]
    weights = attentions(model)  # (layers, H, 7, 3 + 7), the prefix first
    ours = torch.cat([weights[..., 3:], weights[..., :3]], dim=-1)
    torch.testing.assert_close(result.heads["ATTN-W"], ours, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result["ATTN-W"], ours.mean(1), rtol=1e-6, atol=1e-6)
    attention = result.aliases["attention"]
    values = prefix_values(model, weights.shape[1])  # (layers, H, 3, d_h)
    for n, calls in enumerate(lens.loaded.calls.modules[lens.loaded.stacks[0].side]):
        out = output_matrix(calls)
        f = torch.einsum("hjs,hsd->hjd", values[n], out.view(values.shape[1], -1, out.shape[1]))
        brought = torch.einsum("hij,hjd->ijd", weights[n][..., :3], f)
        torch.testing.assert_close(result[attention][n][:, 7:], brought.norm(dim=-1), rtol=1e-5, atol=1e-6)
        for scope in result.scopes:
            if scope.endswith("-N"):
                parts = result.parts(scope, n, None)
                torch.testing.assert_close(parts.contributions.sum(1) + parts.bias, parts.actual, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(parts.contributions.norm(dim=-1), result[scope][n], rtol=1e-9, atol=1e-9)
    last = lens.analyze({"input_ids": IDS}, rows=[-1])
    torch.testing.assert_close(last["layer"][:, 0], result["layer"][:, -1], rtol=1e-9, atol=1e-9)
    short, whole = lens.stream([{"input_ids": IDS[:, :4]}, {"input_ids": IDS}])
    torch.testing.assert_close(whole["layer"], result["layer"], rtol=1e-6, atol=1e-6)
    assert short["layer"].shape[1:] == (4, 7)
    for attempt in (
        lambda: lens.flow({"input_ids": IDS}),
        lambda: lens.analyze({"input_ids": IDS}, value_bias="remainder"),
    ):
        with pytest.raises(NormscopeError, match="prefix tuning"):
            attempt()


def attentions(model: Any) -> Tensor:
    """(layers, H, 7, 10): the model's own attention weights, the prefix among them."""
    model.get_base_model().set_attn_implementation("eager")
    with torch.no_grad():
        made = model(input_ids=IDS, output_attentions=True)
    return torch.cat(made.attentions)


def prefix_values(model: Any, heads: int) -> Tensor:
    """(layers, H, 3, d_h): the learned values, repeated for heads that share them."""
    cache = model.get_prompt(1)
    cache = getattr(cache, "self_attention_cache", cache)
    values = torch.stack([layer.values[0].detach() for layer in cache.layers])
    return values.repeat_interleave(heads // values.shape[1], dim=1)


def output_matrix(layer: Any) -> Tensor:
    """(H d_h, d): W_O, under any of its names."""
    for path in ("self_attn.o_proj", "self_attn.out_proj", "attention.dense", "attention.output.dense", "attn.c_proj"):
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            continue
        weight: Tensor = module.weight.detach()
        return weight if path == "attn.c_proj" else weight.t()
    raise AssertionError(layer)


@pytest.mark.parametrize("kind", ["prompt tuning", "P-tuning"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_encoder_of_an_encoder_decoder_reads_virtual_tokens(name: str, kind: str) -> None:
    model = prompted(name, kind)
    given = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    result = Analyzer(model).analyze(given)
    assert texts(result.encoder.columns)[:3] == PROMPT
    assert texts(result.decoder.columns)[4:7] == PROMPT
    stacks = layer_oracle.oracle(model.get_base_model(), embedded(model) | {"decoder_input_ids": IDS[:, :4]})
    for side, layers in stacks.items():
        for n, layer in enumerate(layers):
            for scope, values in maps(layer).items():
                torch.testing.assert_close(result.side(side)[scope][n], values, rtol=2e-6, atol=2e-6)
    with pytest.raises(NormscopeError, match="soft prompt"):
        Analyzer(model).analyze({"input_ids": IDS})  # what it would write without its prompt


def test_unsupported_soft_prompts_are_refused() -> None:
    with pytest.raises(NormscopeError, match="Prefix tuning of an encoder-decoder"):
        Analyzer(prompted("t5", "prefix tuning"))
    with pytest.raises(NormscopeError, match="adaption prompts"):
        Analyzer(prompted("llama", "adaption prompt"))
    multitask = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2)
    with pytest.raises(NormscopeError, match="multitask"):
        Analyzer(peft.get_peft_model(tiny("llama", "CausalLM"), multitask).double().eval())
    lens = Analyzer(prompted("llama", "prompt tuning"))
    with pytest.raises(NormscopeError, match="soft prompt"):
        lens.analyze({"input_ids": IDS}, generate=3)
    with pytest.raises(NormscopeError, match="takes no position_ids"):
        lens.analyze({"input_ids": IDS, "position_ids": torch.arange(7)[None]})
    for method in ("value_zeroing", "gradient_x_input", "integrated_gradients"):
        with pytest.raises(NormscopeError, match="soft prompt"):
            lens.flow({"input_ids": IDS}, method=method, target=1)


@pytest.mark.parametrize("kind", ["prompt tuning", "prefix tuning", "adaption prompt"])
def test_a_prompt_that_is_switched_off(kind: str) -> None:
    model = prompted("llama", kind)
    if kind != "adaption prompt":
        lens = Analyzer(model)
        assert len(lens.analyze({"input_ids": IDS}).columns) == 10
    with model.disable_adapter():
        result = Analyzer(model).analyze({"input_ids": IDS})
        assert len(result.columns) == 7
        if kind != "adaption prompt":
            assert len(lens.analyze({"input_ids": IDS}).columns) == 7
    expected = Analyzer(tiny("llama", "CausalLM")).analyze({"input_ids": IDS})
    torch.testing.assert_close(result["layer"], expected["layer"], rtol=1e-6, atol=1e-6)
    if kind != "adaption prompt":
        assert len(lens.analyze({"input_ids": IDS}).columns) == 10


@pytest.mark.parametrize("kind", ["prompt tuning", "prefix tuning"])
def test_positions_that_the_prompt_takes(kind: str) -> None:
    lens = Analyzer(prompted("gpt2", kind))
    assert lens.loaded.limits.positions == 37
    lens.analyze({"input_ids": torch.arange(3, 40)[None]})
    with pytest.raises(NormscopeError, match="positions for 37"):
        lens.analyze({"input_ids": torch.arange(3, 41)[None]})


@pytest.mark.parametrize("kind", ["prompt tuning", "P-tuning", "prefix tuning"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_check_passes(name: str, kind: str) -> None:
    assert check(Analyzer(prompted(name, kind))).ok


def test_a_prompt_is_shown_and_saved(tmp_path: Any) -> None:
    for kind in ("prompt tuning", "prefix tuning"):
        result = Analyzer(prompted("llama", kind)).analyze({"input_ids": IDS})
        result.save(tmp_path / "x.safetensors")
        again = Analysis.load(tmp_path / "x.safetensors")
        assert again.columns == result.columns
        result.to_html(tmp_path / "x.html")
        assert "[prompt 1]" in (tmp_path / "x.html").read_text(encoding="utf-8")
        result.plot("layer", layer=0)
