"""Analyzer: the front door. A model and its tokenizer; text in, Analysis out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedModel

from normscope import default_model
from normscope.decompose.shapley.gate import Shapley
from normscope.engine.estimate import Estimate
from normscope.engine.request import Options, gate_of, requests_for
from normscope.engine.run import Progress, Workspace, cost, run, run_many
from normscope.errors import NormscopeError
from normscope.flow.result import Flow
from normscope.flow.run import flow
from normscope.inputs import generation
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.inputs.text import Input, check_tokenizer
from normscope.models import loading, versions
from normscope.models.loaded import LoadedModel, describe, run_dtype
from normscope.models.spec import Family
from normscope.tracing.proof import prove


class Analyzer:
    """Norm-based analysis of one model, which is left exactly as it was found.

    `tokenizer` may be None: inputs are then encodings and tokens their ids; a vision model has its image processor
    there. `dtype` is that of the decomposition (default: the model's, at least float32: a model in half precision is
    copied); `memory_budget` in bytes bounds what an analysis may take.
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
        self.loaded = describe(model, tokenizer, dtype)
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
    ) -> Analyzer:
        """Load a model and its tokenizer by hub name or local path. No remote code is run, no pickle is read."""
        name = str(name)
        run_dtype(dtype, torch.float32)
        _check_budget(memory_budget)
        model, tokenizer = loading.load(name, device, dtype)
        lens = cls(model, tokenizer, dtype=dtype, memory_budget=memory_budget)
        lens.loaded.name = default_model.NAME if default_model.is_in(name) else name
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
        target: Input | None = None,
        generate: int | None = None,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        heads: bool | Iterable[int] = False,
        rows: Iterable[int] | int | None = None,
        truncation: bool = False,
        gate: str = "ig",
        value_bias: str = "token",
        progress: Progress | None = None,
    ) -> Any:
        """The maps of one input: a text, a pair ``(a, b)``, ``words=[...]`` or a dict of input_ids, attention_mask, ...

        For a causal language model also ``chat=[{"role": ..., "content": ...}]``, and `generate`: the input is followed
        by so many tokens of the model's own. An encoder-decoder reads `target` (teacher forcing), or translates the
        text itself, with at most `generate` tokens; its result has an `encoder` and a `decoder`. A vision model takes a
        path, a PIL image or an array.

        `scopes`, `layers` and `rows` (output positions, negative from the end) limit what is computed; `heads` adds
        head-level maps, of all heads or of those listed. `truncation` cuts an input that is too long.

        `gate` says how the feed-forward's activation is shared out among the tokens: by integrated gradients ("ig"),
        with a gate held as it is ("frozen"), by the slope ("tangent", which does not add up), or by Shapley values
        ("shapley", slower; "shapley-exact", "shapley-sampled", "shapley-gaussian" choose how).
        """
        requests = requests_for(self.loaded, Options(scopes, layers, heads, rows, gate, value_bias))
        item = _one_item(self.loaded, text, words, chat, target, generate, truncation)
        return run(self.loaded, [item], requests, self.workspace, progress)[0]

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
    ) -> Iterator[Any]:
        """Many inputs, batched by length, yielded in order; each equals `analyze` of it alone.

        An input is anything that `analyze` takes, or a list of words; for an encoder-decoder a pair is a source and its
        target. An encoding of several inputs counts as those.
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
        yield from run_many(self.loaded, items, requests, self.workspace, size)

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
        """How much of the last hidden states, or of a `target`, comes from each input token, across all layers.

        A target is a logit: of a class (index or label), of a token (id or text), the largest ("top"), or the
        difference of two, ``("cat", "dog")``. `position` says where it is read: by default at the last token of a
        causal model, at the mask of a masked one. An encoder-decoder takes a pair, source and target text.

        `method` is one of `normscope.flow.methods.METHODS`, perhaps with an option: "exact", "decompx:norm", "alti",
        "rollout", "rollout:layer" (of any scope), "globenc", "value_zeroing", "alti_logit", ...
        """
        if isinstance(gate_of(gate), Shapley):
            raise NormscopeError(
                "flow() needs gates that are linear in the input; Shapley values are not. Use gate='ig', or analyze()."
            )
        prove(self.loaded)
        item = _one_item(self.loaded, text, words, chat, None, generate, truncation)
        return flow(self.loaded, item, method, target, position, gate, self.workspace)

    def estimate(
        self,
        text: Input | Any | None = None,
        *,
        words: Sequence[str] | None = None,
        chat: Sequence[Mapping[str, str]] | None = None,
        target: Input | None = None,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        heads: bool | Iterable[int] = False,
        rows: Iterable[int] | int | None = None,
        truncation: bool = False,
        gate: str = "ig",
        value_bias: str = "token",
    ) -> Estimate:
        """Memory and time that `analyze` with the same arguments will take, without running it."""
        requests = requests_for(self.loaded, Options(scopes, layers, heads, rows, gate, value_bias))
        return cost(self.loaded, [_one_item(self.loaded, text, words, chat, target, None, truncation)], requests)


def _one_item(
    loaded: LoadedModel,
    text: Any,
    words: Sequence[str] | None,
    chat: Sequence[Mapping[str, str]] | None,
    target: Any,
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
    if target is not None and not loaded.two_sided:
        raise NormscopeError(
            f"{loaded.family.name} is no encoder-decoder: it has no cross-attention and takes no target."
        )
    items = encode(loaded, text if target is None else (text, target), truncation, generate)
    if len(items) != 1:
        raise NormscopeError(f"The encoding holds {len(items)} inputs; analyze() takes one. Use stream(encoding).")
    return items[0]


def _check_budget(given: Any) -> int | None:
    if given is None:
        return None
    whole = isinstance(given, Integral) or (isinstance(given, float) and given.is_integer())
    if isinstance(given, bool) or not whole or given < 1:
        raise NormscopeError(f"memory_budget is a number of bytes, such as 8 * 10**9, or None, not {given!r}.")
    return int(given)
