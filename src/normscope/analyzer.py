"""Analyzer: the front door. A model and its tokenizer; text in, Analysis out."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any, Generic, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import TypeVar

from normscope import default_model, generation, inputs, loading, proving, reading, versions
from normscope.batch import BatchRun
from normscope.decompose.scratch import Scratch
from normscope.decompose.shapley_gate import Shapley
from normscope.errors import NormscopeError, NormscopeWarning
from normscope.estimate import Estimate, default_budget, estimate, refuse_over_budget, shape_of
from normscope.inputs import Input, Item, Limits
from normscope.interface import foreign_attention
from normscope.layers import has_layers, layer_modules
from normscope.models import family_of, max_positions, padding_id, position_rows
from normscope.models.spec import Side, Stack
from normscope.parameters import vocabulary_of
from normscope.request import Request, gate_of, requests_of
from normscope.results import Result, results
from normscope.samples import made_up
from normscope.soft_prompts import SoftPrompt, soft_prompt_of, with_prompt
from normscope.trace import Wish, changed, trace

if TYPE_CHECKING:
    from normscope.flow.result import Flow

Progress = Callable[[int, int], None]
ResultT = TypeVar("ResultT", bound=Result, default=Result, covariant=True)
PROOF_TOKENS = 4  # of the short input that a model is proved with
PROOF_HOLES = 40  # of the longer one for an attention that is not transformers' own
KEPT_SCRATCH = 64 * 2**20  # working memory kept between runs at the most


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
        model = loading.bare(model)
        self.family = family_of(loading.unwrapped(model))
        self.given = loading.single_precision(model)  # as its user has it, perhaps with adapters around it
        self.model: PreTrainedModel = loading.unwrapped(self.given)
        self.base: PreTrainedModel = self.model.base_model
        self.tokenizer = tokenizer
        self.stacks = _present(self.base, self.family.stacks)
        self.depths: list[int] = []  # layer calls of each side, and their heads, as a pass was seen to make them
        self.head_counts: list[int] = []
        self.calls: list[tuple[nn.Module, ...]] = []
        self._uneven = False  # heads
        self.model_name = str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)
        self.revision: str | None = None  # of the hub, where one was asked for
        self.dtype = _dtype(dtype, self.base.dtype)
        self.memory_budget = _budget(memory_budget)
        self._free: list[Scratch] = []  # working memory of finished runs
        if self.family.input != "image":
            inputs.check_tokenizer(tokenizer, self.limits.vocabulary)
        self.prove()

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
            **options: Anything else that `from_pretrained` of transformers takes. `cache_dir`, `force_download`,
                `local_files_only` and `proxies` go to config, model and tokenizer; `use_fast` to the tokenizer; the
                rest to the model. `trust_remote_code=True` and `use_safetensors=False` are refused.

        Returns:
            An Analyzer of the model.

        Raises:
            NormscopeError: If the model cannot be loaded, or is not supported.
        """
        name = str(name)
        _dtype(dtype, torch.float32)
        _budget(memory_budget)
        hub = {"revision": revision, "token": token, "subfolder": subfolder, "gguf_file": gguf_file}
        given = {key: value for key, value in hub.items() if value is not None}
        model, tokenizer = loading.load(name, device, dtype, **given, **options)
        lens = cls(model, tokenizer, dtype=dtype, memory_budget=memory_budget)
        lens.model_name = default_model.NAME if default_model.is_in(name) else name
        lens.revision = revision
        return lens

    @property
    def depth(self) -> int:
        """The number of layers, of the deeper side of an encoder-decoder."""
        return max(self.depths)

    @property
    def prompt(self) -> SoftPrompt | None:
        """The soft prompt of peft that the model has now."""
        prompt = soft_prompt_of(self.given)
        if prompt is not None and self.two_sided and prompt.kind == "keys":
            raise NormscopeError(f"Prefix tuning of an encoder-decoder ({self.family.name}) cannot be analysed.")
        return prompt

    def refuse_prompt(self, what: str) -> None:
        """Refuse what leaves virtual tokens out."""
        if self.prompt is not None:
            raise NormscopeError(f"{what} cannot be had of a model with a soft prompt: it would be left out.")

    @property
    def two_sided(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return len(self.stacks) == 2

    @property
    def limits(self) -> Limits:
        """What the first side can take; `target_limits` what the decoder of an encoder-decoder can."""
        prompt = self.prompt
        if prompt is None:
            return self._limits
        taken = None if self._limits.positions is None else max(1, self._limits.positions - prompt.count)
        return replace(self._limits, positions=taken, keys=self._limits.keys - {"position_ids"})

    @cached_property
    def _limits(self) -> Limits:
        config = self.base.config
        rows = position_rows(self.family, config)
        return Limits(
            vocabulary=vocabulary_of(self.base.get_input_embeddings()),
            positions=max_positions(self.family, self.base),
            computed=self.family.computed_positions,
            position_rows=2**31 if rows is None or self.family.computed_positions else rows,
            token_types=max(1, int(getattr(config, "type_vocab_size", 1) or 1)),
            keys=frozenset(inspect.signature(self.base.forward).parameters),
            pad=padding_id(self.base),
            side=self.stacks[0].side,
        )

    @cached_property
    def target_limits(self) -> Limits:
        """What the decoder of an encoder-decoder can take."""
        decoder: Any = getattr(self.base, "decoder", None)
        embedding = getattr(decoder, "embed_tokens", None)
        vocabulary = self.limits.vocabulary if embedding is None else vocabulary_of(embedding)
        return replace(self.limits, vocabulary=vocabulary, keys=frozenset(inputs.ACCEPTED), side="decoder")

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
        requests = self.requests(scopes=scopes, layers=layers, heads=heads, rows=rows, gate=gate, value_bias=value_bias)
        item = self._item(text, words, chat, text_target, generate, truncation)
        return cast(ResultT, self.run([item], requests, progress)[0])

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
        requests = self.requests(scopes=scopes, layers=layers, heads=heads, rows=rows, gate=gate, value_bias=value_bias)
        size = batch_size.tolist() if hasattr(batch_size, "tolist") else batch_size  # of NumPy or PyTorch
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise NormscopeError(f"batch_size must be an integer of at least 1, not {batch_size!r}.")
        if isinstance(texts, str):
            raise NormscopeError("stream() takes many texts; for one, use analyze(text) or stream([text]).")
        if not isinstance(texts, Iterable):
            raise NormscopeError(f"stream() takes many inputs, such as a list of texts, not {type(texts).__name__}.")
        given = iter([texts] if isinstance(texts, Mapping) else texts)
        items = (item for one in given for item in self.items(one, truncation))
        # A window of several batches is sorted by length, so that little is padded and little is held back.
        while window := list(islice(items, 8 * size)):
            kinds: dict[Any, list[int]] = {}
            for n in sorted(range(len(window)), key=lambda n: -len(window[n])):
                kinds.setdefault(window[n].kind, []).append(n)
            done: dict[int, Result] = {}
            for order in kinds.values():
                for start in range(0, len(order), size):
                    batch = order[start : start + size]
                    done |= zip(batch, self.run([window[n] for n in batch], requests, None), strict=True)
            for n in range(len(window)):
                yield cast(ResultT, done.pop(n))

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
        from normscope.flow.running import flow  # which reads this module

        if isinstance(gate_of(gate), Shapley):
            raise NormscopeError(
                "Shapley values are no linear map of the input vectors, so that nothing flows through them: they are "
                "for analyze(). Use gate='ig'."
            )
        self.requests(gate=gate)
        item = self._item(text, words, chat, None, generate, truncation)
        return flow(self, item, method, target, position, gate)

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
            text: The input: a text, a pair ``(a, b)`` (of an encoder-decoder, source and target text), or a dict of
                input_ids, attention_mask and so on. A vision model takes a path, a PIL image or an array.
            words: The input as a list of words, instead of `text`.
            chat: The input as a conversation, ``[{"role": ..., "content": ...}]``, for causal language models with a
                chat template.
            text_target: The text that an encoder-decoder writes (teacher forcing), or a dict with its input_ids.
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
            target: Refused, as by `analyze`.

        Returns:
            The tokens, the bytes and the seconds, roughly.

        Raises:
            NormscopeError: As `analyze`, except for the memory budget.
        """
        _refuse_target(target)
        requests = self.requests(scopes=scopes, layers=layers, heads=heads, rows=rows, gate=gate, value_bias=value_bias)
        return self.cost([self._item(text, words, chat, text_target, None, truncation)], requests)

    def _item(
        self,
        text: Any,
        words: Sequence[str] | None,
        chat: Sequence[Mapping[str, str]] | None,
        text_target: Any,
        generate: int | None,
        truncation: bool,
    ) -> Item:
        if sum(given is not None for given in (text, words, chat)) != 1:
            raise NormscopeError("Give one input: a text, a pair (a, b), an encoding, words=[...] or chat=[...].")
        if words is not None:
            text = list(words) if hasattr(words, "__iter__") else []
            if isinstance(words, str) or not hasattr(words, "__iter__") or not all(isinstance(w, str) for w in text):
                raise NormscopeError("words must be a list of strings, such as ['Colin', 'plays'].")
        elif chat is not None:
            text = generation.chat_text(self.tokenizer, chat)
        elif isinstance(text, list):
            raise NormscopeError(
                "A list is ambiguous: use words=[...] for one sentence of words, stream([...]) for many."
            )
        if text_target is not None and not self.two_sided:
            raise NormscopeError(f"{self.family.name} is not an encoder-decoder: it takes no text_target.")
        items = self.items(text if text_target is None else (text, text_target), truncation, generate)
        if len(items) != 1:
            raise NormscopeError(f"The encoding holds {len(items)} inputs; analyze() takes one. Use stream(encoding).")
        return items[0]

    def items(self, given: Any, truncation: bool = False, generate: int | None = None) -> list[Item]:
        """One input as items, the target of an encoder-decoder included."""
        prompt = self.prompt
        if prompt is not None and generate is not None:
            raise NormscopeError("A model with a soft prompt is not continued here: give the whole text.")
        return [with_prompt(item, prompt) for item in reading.items(self, given, truncation, generate)]

    def requests(
        self,
        *,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        heads: bool | Iterable[int] = False,
        rows: Iterable[int] | int | None = None,
        gate: str = "ig",
        value_bias: str = "token",
    ) -> list[Request]:
        """What is asked for, checked: one request for every side of the model that has such scopes."""
        self.prove()
        if heads is not False and self._uneven:
            raise NormscopeError("The layers of this model have different numbers of heads: leave heads out.")
        return requests_of(
            self.stacks,
            self.depths,
            self.head_counts,
            scopes=scopes,
            layers=layers,
            heads=heads,
            rows=rows,
            gate=gate,
            value_bias=value_bias,
        )

    def prove(self) -> None:
        """Refuse a model that computes anything else than what is seen of it, in one short input (`proving`). A model
        that was proved and has not been changed since is not run again."""
        # A list of layers that was cut is a new one, in training mode by itself, which changes nothing.
        lists = nn.ModuleList | nn.ModuleDict
        if any(module.training for module in self.given.modules() if not isinstance(module, lists)):
            raise NormscopeError("The model is in training mode: dropout would change every number. Call model.eval().")
        seen = proving.known(self.given, self.base, self.stacks)
        if seen is None:
            if self.family.input == "text" and foreign_attention(self.base):  # it must heed masks and windows too
                proving.compare(self._sample(PROOF_HOLES, holes=True))
            seen = proving.prove(self._sample(PROOF_TOKENS))
        self.calls = [seen.calls[stack.side] for stack in self.stacks]
        self.depths = [len(calls) for calls in self.calls]
        self.head_counts = [max(seen.heads[stack.side]) for stack in self.stacks]
        self._uneven = any(len(set(some)) > 1 for some in seen.heads.values())

    def cost(self, items: Sequence[Item], requests: Sequence[Request]) -> Estimate:
        """Memory and time of one batch."""
        costs = [
            estimate([len(item.sides[request.stack.side]) for item in items], request, shape, self.dtype)
            for request, shape in ((request, self._shapes[request.stack.side]) for request in requests)
        ]
        return Estimate(max(c.tokens for c in costs), sum(c.memory for c in costs), sum(c.seconds for c in costs))

    @cached_property
    def _shapes(self) -> dict[str, Any]:
        return {
            stack.side: shape_of(layer_modules(self.base, stack)[0], self.base.config, heads)
            for stack, heads in zip(self.stacks, self.head_counts, strict=True)
        }

    def run(
        self,
        items: Sequence[Item],
        requests: Sequence[Request],
        progress: Progress | None = None,
        first: Callable[[list[Result]], None] | None = None,
    ) -> list[Result]:
        """One forward pass over a batch; each layer is decomposed as soon as it is done. `first` is told the results of
        the first layer as soon as they are there, unless the model has two sides."""
        if len(items) > 1 and changed(self.base):  # what others put there may count tokens or items
            return [result for item in items for result in self.run([item], requests, progress)]
        budget = default_budget() if self.memory_budget is None else self.memory_budget
        refuse_over_budget(self.cost(items, requests), budget)
        try:
            scratch = self._free.pop()
        except IndexError:
            scratch = Scratch()
        total = sum(len(request.layers) for request in requests)
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)
            if first is not None and done == 1 < total and not self.two_sided:
                first(results(self, items, runs, slice(0, 1)))

        runs = [
            BatchRun(request, items, self.base.device, self.dtype, scratch, tick, self.calls_of(request.stack))
            for request in requests
        ]
        try:
            self.trace(items, [run.wish for run in runs])
        finally:
            scratch.trim(KEPT_SCRATCH)
            self._free.append(scratch)
        found = results(self, items, runs, slice(None))
        for text in dict.fromkeys(text for one in found for text in one.warnings):
            warnings.warn(text, NormscopeWarning, stacklevel=3)  # where analyze() is called
        return found

    def _sample(self, length: int, *, holes: bool = False) -> proving.Pass:
        """A pass over a made-up input, perhaps with holes in its mask."""
        made = made_up(self, [length])[0]
        if holes:
            made["attention_mask"] = (torch.arange(len(made["input_ids"])) % 5 != 2).long()
        (item,) = self.items(made)
        sides = [stack.side for stack in self.stacks]
        return self.as_pass(self.batch([item]), {side: inputs.real([item], side, self.base.device) for side in sides})

    def as_pass(self, batch: Mapping[str, Any], real: Mapping[Side, Tensor]) -> proving.Pass:
        """A forward pass to be compared with the model alone. `real`: side -> the tokens that are not padding."""
        prompt = self.prompt
        return proving.Pass(
            run=self.given,
            watched=self.model if prompt is None else self.given,
            base=self.base,
            stacks=self.stacks,
            inputs=batch,
            real=real,
            dtype=self.dtype,
            virtual=prompt.count if prompt is not None and prompt.kind == "keys" else 0,
            rewrites=prompt is not None,
        )

    def trace(
        self, items: Sequence[Item], wishes: Sequence[Wish], *, head: bool = False, to_the_end: bool = False
    ) -> Any:
        """One watched forward pass over a batch, of the model with its head if that is wanted."""
        # A hook before the base model sees how it is called, so that it is called as its user does.
        wrapped = self.prompt is not None or bool(self.base._forward_pre_hooks)
        model = self.given if wrapped else self.model if head else self.base
        return trace(self.base, self.batch(items), wishes, self.dtype, model, to_the_end)

    def calls_of(self, stack: Stack) -> tuple[nn.Module, ...]:
        """The layer module of every call of a side."""
        return self.calls[self.stacks.index(stack)]

    def __repr__(self) -> str:
        layers = " + ".join(f"{depth} {stack.side}" for stack, depth in zip(self.stacks, self.depths, strict=True))
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"Analyzer(model={self.model_name!r}, family={self.family.name!r}, {layers} layers, {dtype}, "
            f"device={str(self.base.device)!r})"
        )

    def batch(self, items: Sequence[Item]) -> dict[str, Any]:
        """The arguments of the model's forward pass."""
        batch: dict[str, Any] = dict(inputs.collate(items, self.limits.pad, self.base.device))
        for key in inputs.FEATURES.values():
            if key in batch:
                batch[key] = batch[key].to(self.base.dtype)
        if "use_cache" in self.limits.keys:  # a cache would keep keys and values for nothing
            batch["use_cache"] = False
        if getattr(self.model.config, "return_dict", True) is False:  # tuples have no names
            batch["return_dict"] = True
        return batch


def _present(base: PreTrainedModel, stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The sides that a model has: of an encoder-decoder perhaps the encoder alone."""
    found = tuple(stack for stack in stacks if has_layers(base, stack))
    if len(stacks) == 2 and [stack.side for stack in found] == ["decoder"]:
        raise NormscopeError(
            f"{type(base).__name__} is a decoder without the encoder that it reads. Load the whole model."
        )
    return found or stacks


def _refuse_target(target: Any) -> None:
    if target is not None:
        raise NormscopeError(
            "analyze() and estimate() take no target. Use text_target= for the text that an encoder-decoder writes; a "
            "logit to explain is for flow(..., target=...)."
        )


def _budget(given: Any) -> int | None:
    if given is None:
        return None
    whole = isinstance(given, Integral) or (isinstance(given, float) and given.is_integer())
    if isinstance(given, bool) or not whole or given < 1:
        raise NormscopeError(f"memory_budget is a number of bytes, such as 8 * 10**9, or None, not {given!r}.")
    return int(given)


def _dtype(wanted: torch.dtype | None, model: torch.dtype) -> torch.dtype:
    if wanted is not None and not isinstance(wanted, torch.dtype):
        raise NormscopeError(f"dtype is torch.float32 or torch.float64, not {type(wanted).__name__} {wanted!r}.")
    dtype = wanted or (torch.float64 if model == torch.float64 else torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise NormscopeError(f"Decompositions run in float32 or float64, not {str(dtype).removeprefix('torch.')}.")
    return dtype
