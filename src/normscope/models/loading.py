"""Load models by name; unwrap compiled and adapted ones; convert half precision to float32."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from normscope.errors import NormscopeError, NormscopeWarning
from normscope.models import packages, versions
from normscope.models.registry import families
from normscope.models.source import EXPECTED_MODEL, check_model_folder

HALF_PRECISION = (torch.float16, torch.bfloat16)
# Heads are loaded for flows to logits, losses and generation; analyses use the base model only.
HEADS = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "audio": "AutoModelForSpeechSeq2Seq",
    "pictures": "AutoModelForImageTextToText",
}
TASKS = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForImageClassification": "AutoModelForImageClassification",
}


SHARED = frozenset(  # options passed to config, model and tokenizer
    ["revision", "token", "subfolder", "gguf_file", "cache_dir", "force_download", "local_files_only", "proxies"]
)
GGUF_HEADS = ("ForCausalLM", "ForConditionalGeneration")  # a GGUF file names no head: it holds a model that writes
KINDS = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}  # by a model's main input
TOKENIZERS = frozenset(("use_fast",))  # options passed to the tokenizer or image processor only


def load_pretrained(
    name: str, device: str | torch.device | None, dtype: torch.dtype | None, **options: Any
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer or image processor, by default in float32.

    `options` are passed to `from_pretrained` of transformers. No remote code is run and no pickle is read.
    """
    _refuse_options(options)
    shared = {key: value for key, value in options.items() if key in SHARED}
    own = {key: value for key, value in options.items() if key not in SHARED | TOKENIZERS}
    readers = {key: value for key, value in options.items() if key in TOKENIZERS}
    check_model_folder(name)
    folder = name
    if "gguf_file" not in options:
        folder, shared = _find_gguf_file(name, shared)
    with _explain_loading_errors(name):
        config = AutoConfig.from_pretrained(folder, **shared)
        architectures = config.architectures or (GGUF_HEADS if "gguf_file" in shared else ())
        model, missing = _load_weights(folder, config, _auto_class(config, architectures), dtype, shared | own)
        if missing and type(model).base_model_prefix and model.base_model is not model:
            # Perhaps only the head is missing.
            model, missing = _load_weights(folder, config, "AutoModel", dtype, shared | own)
    with _explain_loading_errors(name, config):
        kind = "pictures" if reads_pictures(config) else _input_kind(config, model)
        tokenizer = _load_tokenizer(folder, kind, shared | readers)
    if missing:
        raise NormscopeError(
            f"The checkpoint {name!r} lacks {len(missing)} weights of the model, such as {missing[0]}; they would be "
            "initialised at random. Use a complete checkpoint."
        )
    if hasattr(tokenizer, "all_special_ids") and len(tokenizer) <= len(tokenizer.all_special_ids):
        raise NormscopeError(f"{name!r} has no tokenizer files, only special tokens. Add the files.")
    try:
        return model.to(device or "cpu").eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise NormscopeError(f"Cannot move the model to {device!r}: {str(error).splitlines()[0]}") from error


@contextmanager
def _explain_loading_errors(name: str, config: Any = None) -> Iterator[None]:
    """Turn any loading error into a NormscopeError; if a package is missing, the message names it.

    Pass `config` when loading the tokenizer or image processor of that model.
    """
    try:
        yield
    except Exception as error:  # each of the libraries involved has its own exceptions
        start = f"Cannot load a model from {name!r}:"
        kind = None if config is None else _input_kind(config)
        readers = () if kind in (None, "image") else packages.tokenizer_packages(name, config.model_type)
        package = packages.missing_package(error, readers)
        if package is not None:
            part = "it" if kind is None else "its image processor" if kind == "image" else "its tokenizer"
            raise NormscopeError(
                f"{start} {part} needs {package}, which is not installed. Install it with: "
                f"{packages.package_install_command(package)}"
            ) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NormscopeError(f"{start} {reason.rstrip('.')}. {EXPECTED_MODEL}") from error


def _refuse_options(options: dict[str, Any]) -> None:
    """Refuse unsafe or conflicting options, and remove those that only ask for the default."""
    if options.pop("trust_remote_code", False):
        raise NormscopeError(
            "trust_remote_code=True is refused: normscope runs no code from model repositories and knows only the "
            "families of transformers itself. If you trust the code, load the model with transformers, describe its "
            "layers with normscope.register_family, and use Analyzer(model, tokenizer)."
        )
    if not options.pop("use_safetensors", True):
        raise NormscopeError(
            "use_safetensors=False is refused: the alternative is pickles, which can run arbitrary code."
        )
    for name in ("torch_dtype", "config", "output_loading_info"):
        if name in options:
            raise NormscopeError(f"from_pretrained() takes no {name}. To set the precision, use dtype=torch.float32.")


def _find_gguf_file(name: str, shared: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The folder and the options for a name that is the path of a GGUF file; other names as they are."""
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        for package in ("gguf", "accelerate"):
            if not packages.is_package_installed(package):
                raise NormscopeError(
                    f"Cannot load {name!r}: GGUF files need {package}, which is not installed. Install it with: "
                    f"{packages.package_install_command(package)}"
                )
        return str(path.parent), shared | {"gguf_file": path.name}
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if files and not (path / "config.json").is_file():
        raise NormscopeError(
            f"{name!r} has no config.json, but {'a GGUF file' if len(files) == 1 else 'GGUF files'}. Pass the path of "
            f"the file: {str(files[0])!r}."
        )
    return name, shared


def _load_weights(
    name: str, config: Any, auto: str, dtype: torch.dtype | None, options: dict[str, Any]
) -> tuple[Any, list[str]]:
    """The model and the names of weights missing from the checkpoint, except those of the pooler."""
    fixed = {"use_safetensors": True, "output_loading_info": True}
    if versions.sdpa_ignores(config, versions.installed_version()):
        options = {"attn_implementation": "eager"} | options
    model, report = getattr(transformers, auto).from_pretrained(
        name, config=config, dtype=dtype or torch.float32, **options, **fixed
    )
    return model, sorted(key for key in report["missing_keys"] if "pooler." not in key)


def _auto_class(config: Any, architectures: Sequence[str]) -> str:
    """The auto class with the head of the checkpoint, or `AutoModel` if that head is not known."""
    heads = " ".join(architectures)
    if reads_pictures(config) and "ForConditionalGeneration" in heads:
        return HEADS["pictures"]
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


def reads_pictures(config: Any) -> bool:
    """Whether a type reads pictures beside a text that it goes on with."""
    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not config.is_encoder_decoder


def _input_kind(config: Any, model: Any = None) -> str:
    """The input of a model: "text", "image", "audio" (with a decoder of text) or "sound" (without)."""
    kind = KINDS.get(getattr(model, "main_input_name", "input_ids"), "text")
    kind = next((family.input for family in families() if config.model_type in family.model_types), kind)
    return "sound" if kind == "audio" and not config.is_encoder_decoder else kind


def _load_tokenizer(name: str, kind: str, options: dict[str, Any]) -> Any:
    if kind == "sound":
        try:
            return transformers.AutoFeatureExtractor.from_pretrained(name, **options)
        except (ImportError, OSError, ValueError):  # encodings need none
            return None
    if kind in ("pictures", "audio"):
        try:
            return transformers.AutoProcessor.from_pretrained(name, **options)
        except (ImportError, OSError, ValueError):  # it needs other packages, or files; texts need the tokenizer alone
            return AutoTokenizer.from_pretrained(name, **options)
    if kind == "image":
        return transformers.AutoImageProcessor.from_pretrained(name, **options)
    return AutoTokenizer.from_pretrained(name, **options)


def unwrap_compiled(model: Any) -> Any:
    """The model inside `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    while isinstance(model, nn.Module):
        inside = model._modules.get("_orig_mod")
        if inside is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inside = model.module
        if inside is None:
            break
        model = inside
    return model


def unwrap_adapters(model: Any) -> Any:
    """The Hugging Face model inside a peft model; its adapters stay active."""
    inside = getattr(model, "get_base_model", None)
    return inside() if callable(inside) and not isinstance(model, PreTrainedModel) else model


def single_precision(model: Any) -> Any:
    """The model itself, or a float32 copy if any part of it is in half precision, whose rounding errors exceed small
    contributions."""
    if not isinstance(model, nn.Module) or not any(tensor.dtype in HALF_PRECISION for tensor in _all_tensors(model)):
        return model
    kinds = sorted(
        {str(tensor.dtype).removeprefix("torch.") for tensor in _all_tensors(model) if tensor.dtype in HALF_PRECISION}
    )
    whole = all(tensor.dtype in HALF_PRECISION for tensor in _all_tensors(model) if tensor.is_floating_point())
    size = sum(
        tensor.numel() * (4 if tensor.dtype in HALF_PRECISION else tensor.element_size())
        for tensor in _all_tensors(model)
    )
    warnings.warn(
        f"{'The model' if whole else 'A part of the model'} is in {' and '.join(kinds)}: a float32 copy of it "
        f"({size / 1e9:.1f} GB) is analysed. Load the model with dtype=torch.float32 to avoid the second copy.",
        category=NormscopeWarning,
        stacklevel=3,
    )
    copied: Any = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in _all_tensors(copied):
            if tensor.dtype in HALF_PRECISION:
                tensor.data = tensor.data.float()
    return copied


def _all_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
