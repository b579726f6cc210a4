"""Analyzer: the front door. A model and its tokenizer; text in, Analysis out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Generic, cast

import torch
from transformers import PreTrainedModel
from typing_extensions import TypeVar

from normscope import default_model
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
from normscope.models.spec import Family
from normscope.tracing.proof import prove

ResultT = TypeVar("ResultT", bound=Result, default=Result, covariant=True)


class Analyzer(Generic[ResultT]):
    """Norm-based analysis of one model, which is left exactly as it was found.

    Results are an Analysis, or for an encoder-decoder an EncoderDecoderAnalysis. A type checker cannot know which;
    tell it with ``lens: Analyzer[Analysis] = Analyzer.from_pretrained(...)``, or ask with ``isinstance``.

    Args:
        model: A model of transformers, of a supported family, in evaluation mode; adapters of peft are kept in place.
        tokenizer: Its tokenizer, or the image processor of a vision model. Without one, inputs are encodings and tokens
            their ids.
        dtype: The precision of the decomposition, torch.float32 or torch.float64; by default the model's, at least
            float32. A model in half precision is copied.
        memory_budget: The bytes that an analysis may take; by default most of what is free.

    Raises:
        NormscopeError: If the model's family is not supported, or the model does not compute what its family says.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
    ) -> None:
        versions.warn_if_untested()
        self.loaded = load_model(model, tokenizer, dtype)
        self.workspace = Workspace(_check_budget(memory_budget))
        if self.family.input != "image":
            check_tokenizer(tokenizer, self.loaded.limits.vocabulary)
        prove(self.loaded)

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
        """Load a model and its tokenizer by hub name or local path. No remote code is run, no pickle is read.

        Args:
            name: A name on the hub, or the path of a folder.
            device: Where the model goes, such as "cuda"; by default the CPU.
            dtype: The precision of the model and of the decomposition; by default torch.float32.
            memory_budget: The bytes that an analysis may take; by default most of what is free.
            revision: The branch, tag or commit on the hub.
            token: The access token for the hub, or True for the one that is stored.
            subfolder: The folder inside the repository that holds the model.
            gguf_file: A GGUF file inside the folder or repository, which transformers unpacks.
            **options: Other arguments of transformers' `from_pretrained`: `use_fast` goes to the tokenizer, `cache_dir`
                and the like to everything, the rest to the model. `trust_remote_code=True` is refused.

        Returns:
            An Analyzer of the model.

        Raises:
            NormscopeError: If the model cannot be loaded, or is not supported.
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
        """The description of the model's layers."""
        return self.loaded.family

    @property
    def model_name(self) -> str:
        """The name that results carry."""
        return self.loaded.name

    @property
    def revision(self) -> str | None:
        """The branch, tag or commit of the hub that was asked for."""
        return self.loaded.revision

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decomposition."""
        return self.loaded.dtype

    @property
    def memory_budget(self) -> int | None:
        """The bytes that an analysis may take; None: most of what is free."""
        return self.workspace.budget

    @property
    def depth(self) -> int:
        """The number of layers, of the deeper side of an encoder-decoder."""
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
        """The maps of one input. `scopes`, `layers`, `heads` and `rows` limit what is computed.

        Args:
            text: The input: a text, a pair ``(a, b)`` (of an encoder-decoder, source and target text), or a dict of
                input_ids, attention_mask and so on. A vision model takes a path, a PIL image or an array.
            words: The input as a list of words, instead of `text`.
            chat: The input as a conversation, ``[{"role": ..., "content": ...}]``, for causal language models with a
                chat template.
            text_target: The text that an encoder-decoder writes (teacher forcing), or a dict with its input_ids.
                Without it the model translates the text itself.
            generate: How many tokens a causal language model adds to the input before it is analysed; for an
                encoder-decoder without `text_target`, the most that it writes.
            scopes: The scopes to compute, in any case, or their aliases; by default all of the model's.
            layers: The layers to compute, counted from 0 (negative from the end); by default all.
            heads: True for head-level maps of all heads, or the heads to keep.
            rows: The output positions to compute, counted from 0 (negative from the end); by default all.
            truncation: Cut an input that is too long instead of refusing it.
            gate: How the feed-forward's activation is shared out among the tokens: "ig" (integrated gradients),
                "frozen" (the gate held as it is), "tangent" (the slope, which does not add up) or "shapley" (slower;
                "shapley-exact", "shapley-sampled" and "shapley-gaussian" choose how).
            value_bias: Whether value biases and the beta of a norm before the attention count as the token's
                ("token", as in the papers) or go to the remainder ("remainder").
            progress: A function that is called with the number of layers done and of all layers.
            target: Refused here: a logit as `target` is for `flow`, the text of a decoder is `text_target`.

        Returns:
            An Analysis, or for an encoder-decoder an EncoderDecoderAnalysis with an `encoder` and a `decoder`.

        Raises:
            NormscopeError: If the input cannot be read, there is no such scope, layer, head or row, the memory budget
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
        """Many inputs, batched by length, yielded in order; each equals `analyze` of it alone.

        Args:
            texts: The inputs. Each is anything that `analyze` takes as `text`, or a list of words; for an
                encoder-decoder a pair is a source and its target text. An encoding of several inputs counts as those.
            batch_size: How many inputs go through the model at a time.
            scopes: The scopes to compute, in any case, or their aliases; by default all of the model's.
            layers: The layers to compute, counted from 0 (negative from the end); by default all.
            heads: True for head-level maps of all heads, or the heads to keep.
            rows: The output positions to compute, counted from 0 (negative from the end); by default all.
            truncation: Cut an input that is too long instead of refusing it.
            gate: How the feed-forward's activation is shared out among the tokens: "ig" (integrated gradients),
                "frozen" (the gate held as it is), "tangent" (the slope, which does not add up) or "shapley" (slower;
                "shapley-exact", "shapley-sampled" and "shapley-gaussian" choose how).
            value_bias: Whether value biases and the beta of a norm before the attention count as the token's
                ("token", as in the papers) or go to the remainder ("remainder").

        Yields:
            The result of each input, as `analyze` returns it.

        Raises:
            NormscopeError: As `analyze`, when the input is reached.
        """
        requests = requests_for(self.loaded, Options(scopes, layers, heads, rows, gate, value_bias))
        size = batch_size.tolist() if hasattr(batch_size, "tolist") else batch_size  # of NumPy or PyTorch
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise NormscopeError(f"batch_size must be an integer of at least 1, not {batch_size!r}.")
        if isinstance(texts, str):
            raise NormscopeError("stream() takes many texts; for one, use analyze(text) or stream([text]).")
        if not isinstance(texts, Iterable):
            raise NormscopeError(f"stream() takes many inputs, such as a list of texts, not {type(texts).__name__}.")
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
            text: The input, as for `analyze`; of an encoder-decoder a pair, source and target text.
            words: The input as a list of words, instead of `text`.
            chat: The input as a conversation, instead of `text`.
            method: One of `normscope.flow.methods.METHODS`, perhaps with an option: "exact", "decompx:norm", "alti",
                "rollout", "rollout:layer" (of any scope), "globenc", "value_zeroing", "alti_logit" and so on.
            target: The logit to explain: of a class (index or label), of a token (id or text), the largest ("top"), or
                the difference of two, ``("cat", "dog")``. By default none: the flow goes to the last hidden states.
            position: Where the logit is read; by default at the last token of a causal model, at the mask of a masked
                one.
            generate: How many tokens a causal language model adds to the input before it is analysed; for an
                encoder-decoder without a target text, the most that it writes.
            truncation: Cut an input that is too long instead of refusing it.
            gate: How the feed-forward's activation is shared out: "ig", "frozen" or "tangent".

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
        """Memory and time that `analyze` with the same arguments will take, without running it.

        Args:
            text: The input, as for `analyze`.
            words: The input as a list of words, instead of `text`.
            chat: The input as a conversation, instead of `text`.
            text_target: The text that an encoder-decoder writes, as for `analyze`.
            scopes: The scopes to compute, as for `analyze`.
            layers: The layers to compute, as for `analyze`.
            heads: The head-level maps to compute, as for `analyze`.
            rows: The output positions to compute, as for `analyze`.
            truncation: Cut an input that is too long instead of refusing it.
            gate: How the feed-forward's activation is shared out, as for `analyze`.
            value_bias: Where value biases go, as for `analyze`.
            target: Refused, as by `analyze`.

        Returns:
            The tokens, the bytes and the seconds, roughly.

        Raises:
            NormscopeError: As `analyze`, except for the memory budget.
        """
        _refuse_target(target)
        requests = requests_for(self.loaded, Options(scopes, layers, heads, rows, gate, value_bias))
        return batch_cost(
            self.loaded, [_one_item(self.loaded, text, words, chat, text_target, None, truncation)], requests
        )

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
    """The one input that was given, in one of several ways."""
    if sum(given is not None for given in (text, words, chat)) != 1:
        raise NormscopeError("Give one input: a text, a pair (a, b), an encoding, words=[...] or chat=[...].")
    if words is not None:
        text = list(words) if hasattr(words, "__iter__") else []
        if isinstance(words, str) or not hasattr(words, "__iter__") or not all(isinstance(w, str) for w in text):
            raise NormscopeError("words must be a list of strings, such as ['Colin', 'plays'].")
    elif chat is not None:
        text = generation.chat_text(loaded.tokenizer, chat)
    elif isinstance(text, list):
        raise NormscopeError("A list is ambiguous: use words=[...] for one sentence of words, stream([...]) for many.")
    if text_target is not None and not loaded.two_sided:
        raise NormscopeError(f"{loaded.family.name} is not an encoder-decoder: it takes no text_target.")
    items = encode(loaded, text if text_target is None else (text, text_target), truncation, generate)
    if len(items) != 1:
        raise NormscopeError(f"The encoding holds {len(items)} inputs; analyze() takes one. Use stream(encoding).")
    return items[0]


def _refuse_target(target: Any) -> None:
    if target is not None:
        raise NormscopeError(
            "analyze() and estimate() take no target. Use text_target= for the text that an encoder-decoder writes; a "
            "logit to explain is for flow(..., target=...)."
        )


def _check_budget(given: Any) -> int | None:
    if given is None:
        return None
    whole = isinstance(given, Integral) or (isinstance(given, float) and given.is_integer())
    if isinstance(given, bool) or not whole or given < 1:
        raise NormscopeError(f"memory_budget is a number of bytes, such as 8 * 10**9, or None, not {given!r}.")
    return int(given)
