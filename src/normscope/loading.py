"""Models as people have them: by name, half precision, with adapters."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from normscope.errors import NormscopeError
from normscope.models import families

EXPECTED = "Give a hub name or the path of a folder with config.json, model.safetensors and a tokenizer."
# Heads come along, for flows to their logits, losses and generation; analyses use the base model inside.
HEADS = {"causal": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM", "audio": "AutoModelForSpeechSeq2Seq"}
TASKS = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForImageClassification": "AutoModelForImageClassification",
}


def load(name: str, device: str | torch.device | None, dtype: torch.dtype | None) -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer (or image processor), in float32 unless said otherwise. No remote code is run, no
    pickle is read."""
    if (Path(name).is_absolute() or name.startswith(".")) and not Path(name).exists():
        raise NormscopeError(f"Cannot load a model from {name!r}: there is no such folder. {EXPECTED}")
    try:
        config = AutoConfig.from_pretrained(name)
        model, missing = _loaded(name, config, _auto_class(config), dtype)
        if missing and type(model).base_model_prefix and model.base_model is not model:
            model, missing = _loaded(name, config, "AutoModel", dtype)  # the head may be what is not there
        tokenizer = _processor(name, config)
    except Exception as error:  # transformers, huggingface_hub, safetensors and tokenizers each have their own
        raise NormscopeError(
            f"Cannot load a model from {name!r}: {(str(error).strip() or type(error).__name__).splitlines()[0]} "
            f"{EXPECTED}"
        ) from error
    if missing:
        raise NormscopeError(
            f"The checkpoint {name!r} lacks {len(missing)} weights of the model, such as {missing[0]}: they would "
            "be random numbers. Get the whole checkpoint."
        )
    if hasattr(tokenizer, "all_special_ids") and len(tokenizer) <= len(tokenizer.all_special_ids):
        raise NormscopeError(f"There is no tokenizer in {name!r}: only special tokens are known. Add its files.")
    try:
        return model.to(device or "cpu").eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise NormscopeError(f"Cannot move the model to {device!r}: {str(error).splitlines()[0]}") from error


def _loaded(name: str, config: Any, auto: str, dtype: torch.dtype | None) -> tuple[Any, list[str]]:
    """The model, and what the checkpoint lacks of it, the pooler aside."""
    model, loading = getattr(transformers, auto).from_pretrained(
        name, config=config, dtype=dtype or torch.float32, use_safetensors=True, output_loading_info=True
    )
    return model, sorted(key for key in loading["missing_keys"] if "pooler." not in key)


def _auto_class(config: Any) -> str:
    """With the head that the checkpoint has, where it is one that is known; else the base model."""
    heads = " ".join(config.architectures or ())
    for family in families():
        if config.model_type in family.model_types:
            sides = [stack.side for stack in family.stacks]
            if sides == ["decoder"] and "CausalLM" in heads + ("LMHead" in heads) * "CausalLM":
                return HEADS["causal"]
            if sides == ["encoder", "decoder"] and any(h in heads for h in ("ConditionalGeneration", "MTModel")):
                return HEADS["audio" if family.input == "audio" else "seq2seq"]
            if len(sides) == 1:
                return next((auto for task, auto in TASKS.items() if task in heads), "AutoModel")
    return "AutoModel"


def _processor(name: str, config: Any) -> Any:
    kind = next((family.input for family in families() if config.model_type in family.model_types), "text")
    if kind == "image":
        return transformers.AutoImageProcessor.from_pretrained(name)
    return AutoTokenizer.from_pretrained(name)


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside a peft model, with its adapters in place."""
    inside = getattr(model, "get_base_model", None)
    return inside() if callable(inside) and not isinstance(model, PreTrainedModel) else model


def single_precision(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or a float32 copy of one in half precision, whose rounding would drown small contributions."""
    if model.dtype not in (torch.float16, torch.bfloat16):
        return model
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    warnings.warn(
        f"The model is in {str(model.dtype).removeprefix('torch.')}: a float32 copy of it ({size / 1e9:.1f} GB) is "
        "analysed. Load it with dtype=torch.float32 to have one copy only.",
        stacklevel=3,
    )
    copied: PreTrainedModel = copy.deepcopy(model).float()
    return copied
