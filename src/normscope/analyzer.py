"""Analyzer, the main entry point: wraps a model and its tokenizer, takes text and returns an Analysis."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Generic, cast

import torch
from transformers import PreTrainedModel
from typing_extensions import TypeVar

from normscope import default_model
from normscope.derivation.family import describe_model
from normscope.derivation.prove import announce, prove_description
from normscope.engine.request import Estimate, Options, requests_for
from normscope.engine.run import Progress, Result, Workspace, batch_cost, run_batch, run_stream
from normscope.errors import NormscopeError
from normscope.flow.result import Flow
from normscope.flow.run import check_flow_gate, run_flow
from normscope.inputs import generation
from normscope.inputs.encode import Input, check_tokenizer, encode
from normscope.inputs.item import Item
from normscope.models import loading, versions
from normscope.models.loaded import LoadedModel, load_model, run_dtype
from normscope.models.registry import is_built_in, refuse_unknown_type
from normscope.models.spec import Family
from normscope.tracing.proof import prove

ResultT = TypeVar("ResultT", bound=Result, default=Result, covariant=True)


class Analyzer(Generic[ResultT]):
    """Norm-based analysis of one model. The model is not modified.

    Results are an Analysis, or an EncoderDecoderAnalysis for an encoder-decoder. Type checkers cannot infer which:
    annotate ``lens: Analyzer[Analysis] = Analyzer.from_pretrained(...)`` or use ``isinstance``.

    Args:
        model: A transformers model of a supported family, in evaluation mode. PEFT adapters stay in place.
        tokenizer: The tokenizer, or the image processor of a vision model. Without it, inputs must be encodings, and
            tokens are shown as ids.
        dtype: Precision of the decomposition, torch.float32 or torch.float64; default: the model's, at least float32.
            A model in half precision is copied.
        memory_budget: Memory limit of an analysis in bytes; default: most of the free memory.
        derive: Describe a model of an unknown type by watching it (see `normscope.derive`), instead of refusing it.

    Raises:
        NormscopeError: If the model's family is not supported, or the model computes something other than its family.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
        derive: bool = True,
    ) -> None:
        versions.warn_if_untested_version()
        self.loaded = load_model(model, tokenizer, dtype, describe_model if derive else refuse_unknown_type)
        self.workspace = Workspace(_check_budget(memory_budget))
        if self.family.input != "image":
            check_tokenizer(tokenizer, self.loaded.limits.vocabulary)
        prove(self.loaded)
        if not is_built_in(self.family):
            announce(self.loaded, prove_description(self.loaded))

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        subfolder: str | None = None,
        gguf_file: str | None = None,
        **options: Any,
    ) -> Analyzer[ResultT]:
        """Load a model and its tokenizer by hub name or local path, without running remote code or reading pickles.

        Args:
            name: A name on the Hugging Face hub, or the path of a folder.
            device: The model's device, such as "cuda"; default: the CPU.
            dtype: Precision of the model and of the decomposition; default: torch.float32.
            memory_budget: Memory limit of an analysis in bytes; default: most of the free memory.
            revision: Branch, tag or commit on the hub.
            token: Access token for the hub, or True for the stored one.
            subfolder: Folder of the model inside the repository.
            gguf_file: GGUF file inside the folder or repository, dequantized by transformers.
            **options: Other arguments of transformers' `from_pretrained`. `use_fast` is passed to the tokenizer,
                `cache_dir` and the like to both, the rest to the model. `trust_remote_code=True` is refused.

        Returns:
            An Analyzer for the model.

        Raises:
            NormscopeError: If the model cannot be loaded or is not supported.
        """
        name = str(name)
        run_dtype(dtype, torch.float32)
        _check_budget(memory_budget)
        hub = {"revision": revision, "token": token, "subfolder": subfolder, "gguf_file": gguf_file}
        given = {key: value for key, value in hub.items() if value is not None}
        model, tokenizer = loading.load_pretrained(name, device, dtype, **given, **options)
        lens = cls(model, tokenizer, dtype=dtype, memory_budget=memory_budget)
        lens.loaded.name = default_model.NAME if default_model.is_in(name) else name
        lens.loaded.revision = revision
        return lens

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model, with its head if it has one."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or the image processor of a vision model."""
        return self.loaded.tokenizer

    @property
    def family(self) -> Family:
        """The description of the model's architecture."""
        return self.loaded.family

    @property
    def model_name(self) -> str:
        """The model's name, as stored in results."""
        return self.loaded.name

    @property
    def revision(self) -> str | None:
        """The requested branch, tag or commit on the hub."""
        return self.loaded.revision

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decomposition."""
        return self.loaded.dtype

    @property
    def memory_budget(self) -> int | None:
        """Memory limit of an analysis in bytes; None: most of the free memory."""
        return self.workspace.budget

    @property
    def depth(self) -> int:
        """The number of layers; for an encoder-decoder, of the deeper side."""
        return max(self.loaded.depths)

    @property
    def two_sided(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self.loaded.two_sided

    def analyze(
        self,
        text: Input | Any | None = None,
        *,
        words: Sequence[str] | None = None,
        chat: Sequence[Mapping[str, str]] | None = None,
        text_target: Input | None = None,
        generate: int | None = None,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        heads: bool | Iterable[int] = False,
        rows: Iterable[int] | int | None = None,
        truncation: bool = False,
        gate: str = "ig",
        value_bias: str = "token",
        progress: Progress | None = None,
        target: None = None,
    ) -> ResultT:
        """Compute the maps of one input. Use `scopes`, `layers`, `heads` and `rows` to compute only a part.

        Args:
            text: The input: a text, a pair ``(a, b)`` (for an encoder-decoder, source and target text), or a dict with
                input_ids, attention_mask and so on. A vision model takes a path, a PIL image or an array.
            words: The input as a list of words instead of `text`.
            chat: The input as a conversation, ``[{"role": ..., "content": ...}]``, for causal language models with a
                chat template.
            text_target: The target text of an encoder-decoder (teacher forcing), or a dict with its input_ids; default:
                the text that the model generates.
            generate: Number of tokens that a causal language model generates and appends to the input before the
                analysis; for an encoder-decoder without `text_target`, the maximum number of generated tokens.
            scopes: The scopes to compute (case-insensitive) or their aliases; default: all.
            layers: The layers to compute, counted from 0 (negative: from the end); default: all.
            heads: True for head-level maps of all heads, or the indices of some heads.
            rows: The output positions to compute, counted from 0 (negative: from the end); default: all.
            truncation: Truncate an input that is too long instead of raising an error.
            gate: How the feed-forward's activation is attributed to the tokens: "ig" (integrated gradients), "frozen"
                (the gate as a constant), "tangent" (the slope; contributions then do not sum to the output) or
                "shapley" (slower; variants: "shapley-exact", "shapley-sampled", "shapley-gaussian").
            value_bias: Whether value biases, and the beta of a norm before the attention, are attributed to the token
                ("token", as in the papers) or to the remainder ("remainder").
            progress: Called after each layer with the number of layers done and the total.
            target: Not accepted. Use `flow` to explain a logit and `text_target` for a decoder's text.

        Returns:
            An Analysis, or an EncoderDecoderAnalysis for an encoder-decoder.

        Raises:
            NormscopeError: If the input cannot be read, a scope, layer, head or row does not exist, the memory budget
                is too small, or the contributions do not add up to the model's own vectors.
        """
        _refuse_target(target)
        requests = requests_for(self.loaded, Options(scopes, layers, heads, rows, gate, value_bias))
        item = _one_item(self.loaded, text, words, chat, text_target, generate, truncation)
        return cast(ResultT, run_batch(self.loaded, [item], requests, self.workspace, progress)[0])

    def stream(
        self,
        texts: Iterable[Input] | Mapping[str, Any],
        *,
        batch_size: int = 16,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        heads: bool | Iterable[int] = False,
        rows: Iterable[int] | int | None = None,
        truncation: bool = False,
        gate: str = "ig",
        value_bias: str = "token",
    ) -> Iterator[ResultT]:
        """Analyse many inputs, batched by length and yielded in order. Batching does not change the results.

        Args:
            texts: The inputs, each as for `analyze(text)` or a list of words. For an encoder-decoder, a pair is a
                source and its target text. An encoding of several inputs yields one result for each.
            batch_size: Number of inputs per forward pass.
            scopes: The scopes to compute, as for `analyze`.
            layers: The layers to compute, as for `analyze`.
            heads: The head-level maps to compute, as for `analyze`.
            rows: The output positions to compute, as for `analyze`.
            truncation: Truncate inputs that are too long instead of raising an error.
            gate: How the feed-forward's activation is attributed to the tokens, as for `analyze`.
            value_bias: Where value biases go, as for `analyze`.

        Yields:
            The result of each input, as from `analyze`.

        Raises:
            NormscopeError: As for `analyze`, when the input is reached.
        """
        requests = requests_for(self.loaded, Options(scopes, layers, heads, rows, gate, value_bias))
        size = batch_size.tolist() if hasattr(batch_size, "tolist") else batch_size  # NumPy and PyTorch scalars
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise NormscopeError(f"batch_size must be an integer of at least 1, not {batch_size!r}.")
        if isinstance(texts, str):
            raise NormscopeError("stream() takes a list of texts, not one text. Use analyze(text) or stream([text]).")
        if not isinstance(texts, Iterable):
            raise NormscopeError(f"stream() takes several inputs, such as a list of texts, not {type(texts).__name__}.")
        given = iter([texts] if isinstance(texts, Mapping) else texts)
        items = (item for one in given for item in encode(self.loaded, one, truncation))
        for result in run_stream(self.loaded, items, requests, self.workspace, size):
            yield cast(ResultT, result)

    def flow(
        self,
        text: Input | Any | None = None,
        *,
        words: Sequence[str] | None = None,
        chat: Sequence[Mapping[str, str]] | None = None,
        method: str = "exact",
        target: Any = None,
        position: int | None = None,
        generate: int | None = None,
        truncation: bool = False,
        gate: str = "ig",
    ) -> Flow:
        """How much of the last hidden states, or of a logit, comes from each input token, across all layers.

        Args:
            text: The input, as for `analyze`; for an encoder-decoder, a pair of source and target text.
            words: The input as a list of words instead of `text`.
            chat: The input as a conversation instead of `text`.
            method: One of `normscope.flow.methods.METHODS`, optionally followed by an option: "exact", "decompx:norm",
                "alti", "rollout", "rollout:layer" (or another scope), "globenc", "value_zeroing", "alti_logit" etc.
            target: The logit to explain: a class (index or label), a token (id or text), the largest logit ("top"), or
                the difference of two, ``("cat", "dog")``; default: none, the flow ends at the last hidden states.
            position: The position of the logit; default: the last token of a causal model, the mask of a masked one.
            generate: Number of tokens that a causal language model generates and appends to the input first; for an
                encoder-decoder without a target text, the maximum number of generated tokens.
            truncation: Truncate an input that is too long instead of raising an error.
            gate: How the feed-forward's activation is attributed: "ig", "frozen" or "tangent".

        Returns:
            A Flow: maps from the input to the states after each layer, and the scores of the target.

        Raises:
            NormscopeError: If the input, the method or the target cannot be used with this model.
        """
        check_flow_gate(gate)
        prove(self.loaded)
        item = _one_item(self.loaded, text, words, chat, None, generate, truncation)
        return run_flow(self.loaded, item, method, target, position, gate, self.workspace)

    def estimate(
        self,
        text: Input | Any | None = None,
        *,
        words: Sequence[str] | None = None,
        chat: Sequence[Mapping[str, str]] | None = None,
        text_target: Input | None = None,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        heads: bool | Iterable[int] = False,
        rows: Iterable[int] | int | None = None,
        truncation: bool = False,
        gate: str = "ig",
        value_bias: str = "token",
        target: None = None,
    ) -> Estimate:
        """Estimate the memory and time that `analyze` takes with the same arguments, without running it.

        Args:
            text: The input, as for `analyze`.
            words: The input as a list of words instead of `text`.
            chat: The input as a conversation instead of `text`.
            text_target: The target text of an encoder-decoder, as for `analyze`.
            scopes: The scopes to compute, as for `analyze`.
            layers: The layers to compute, as for `analyze`.
            heads: The head-level maps to compute, as for `analyze`.
            rows: The output positions to compute, as for `analyze`.
            truncation: Truncate an input that is too long instead of raising an error.
            gate: How the feed-forward's activation is attributed, as for `analyze`.
            value_bias: How value biases are attributed, as for `analyze`.
            target: Not accepted, as for `analyze`.

        Returns:
            The number of tokens, bytes and seconds, as rough estimates.

        Raises:
            NormscopeError: As for `analyze`, except for the memory budget.
        """
        _refuse_target(target)
        requests = requests_for(self.loaded, Options(scopes, layers, heads, rows, gate, value_bias))
        item = _one_item(self.loaded, text, words, chat, text_target, None, truncation)
        return batch_cost(self.loaded, [item], requests)

    def __repr__(self) -> str:
        layers = " + ".join(
            f"{depth} {stack.side}" for stack, depth in zip(self.loaded.stacks, self.loaded.depths, strict=True)
        )
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"Analyzer(model={self.model_name!r}, family={self.family.name!r}, {layers} layers, {dtype}, "
            f"device={str(self.loaded.base.device)!r})"
        )


def _one_item(
    loaded: LoadedModel,
    text: Any,
    words: Sequence[str] | None,
    chat: Sequence[Mapping[str, str]] | None,
    text_target: Any,
    generate: int | None,
    truncation: bool,
) -> Item:
    """The input, given as exactly one of `text`, `words` and `chat`, as an item."""
    if sum(given is not None for given in (text, words, chat)) != 1:
        raise NormscopeError("Pass exactly one input: a text, a pair (a, b), an encoding, words=[...] or chat=[...].")
    if words is not None:
        text = list(words) if hasattr(words, "__iter__") else []
        if isinstance(words, str) or not hasattr(words, "__iter__") or not all(isinstance(w, str) for w in text):
            raise NormscopeError("words must be a list of strings, such as ['Colin', 'plays'].")
    elif chat is not None:
        text = generation.chat_text_for_generation(loaded.tokenizer, chat)
    elif isinstance(text, list):
        raise NormscopeError(
            "A list is ambiguous: use words=[...] for the words of a text, stream([...]) for several texts."
        )
    if text_target is not None and not loaded.two_sided:
        raise NormscopeError(f"text_target is for encoder-decoders only; {loaded.family.name} is not one.")
    items = encode(loaded, text if text_target is None else (text, text_target), truncation, generate)
    if len(items) != 1:
        raise NormscopeError(f"The encoding has {len(items)} inputs, but analyze() takes one. Use stream(encoding).")
    return items[0]


def _refuse_target(target: Any) -> None:
    if target is not None:
        raise NormscopeError(
            "analyze() and estimate() do not accept target. Use text_target= for the target text of an encoder-decoder "
            "or flow(..., target=...) to explain a logit."
        )


def _check_budget(given: Any) -> int | None:
    if given is None:
        return None
    whole = isinstance(given, Integral) or (isinstance(given, float) and given.is_integer())
    if isinstance(given, bool) or not whole or given < 1:
        raise NormscopeError(f"memory_budget must be a number of bytes, such as 8 * 10**9, or None, not {given!r}.")
    return int(given)
