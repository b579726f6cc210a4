"""Analyzer, the main entry point: wraps a model and its tokenizer, takes text and returns an Analysis."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, cast

import torch
from transformers import PreTrainedModel
from typing_extensions import TypeVar

from normscope import default_model
from normscope.arguments import check_memory_budget
from normscope.derivation.prove import load_proved
from normscope.engine.request import Estimate, Options, requests_for
from normscope.engine.run import Progress, Result, Workspace, batch_cost, run_batch, run_stream
from normscope.errors import NormscopeError
from normscope.explain.front import Explains
from normscope.flow.resolve import TargetRequest
from normscope.flow.result import Flow
from normscope.flow.run import check_flow_gate, run_flow, steps_to_freeze
from normscope.inputs.encode import Input, SourceInput, encode, encode_one
from normscope.models import loading
from normscope.models.loaded import run_dtype
from normscope.models.spec import Family
from normscope.step_progress import follow_steps
from normscope.tracing.model_state import is_proved
from normscope.tracing.proof import prove

ResultT = TypeVar("ResultT", bound=Result, default=Result, covariant=True)


class Analyzer(Explains, Generic[ResultT]):
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
        self.loaded = load_proved(model, tokenizer, dtype, derive)
        self.workspace = Workspace(check_memory_budget(memory_budget))

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
        derive: bool = True,
        **options: Any,
    ) -> Analyzer[ResultT]:
        """Load a model and its tokenizer by hub name or local path, without running remote code or reading pickles.

        Args:
            name: A name on the Hugging Face hub, or the path of a folder or of a GGUF file.
            device: The model's device, such as "cuda"; default: the CPU.
            dtype: Precision of the model and of the decomposition; default: torch.float32.
            memory_budget: Memory limit of an analysis in bytes; default: most of the free memory.
            revision: Branch, tag or commit on the hub.
            token: Access token for the hub, or True for the stored one.
            subfolder: Folder of the model inside the repository.
            gguf_file: GGUF file inside the folder or repository, dequantized by transformers.
            derive: Describe a model of an unknown type by watching it, instead of refusing it.
            **options: Other arguments of transformers' `from_pretrained`. `use_fast` is passed to the tokenizer,
                `cache_dir` and the like to both, the rest to the model. `trust_remote_code=True` is refused.

        Returns:
            An Analyzer for the model.

        Raises:
            NormscopeError: If the model cannot be loaded or is not supported.
        """
        name = str(name)
        run_dtype(dtype, torch.float32)
        check_memory_budget(memory_budget)
        hub = {"revision": revision, "token": token, "subfolder": subfolder, "gguf_file": gguf_file}
        given = {key: value for key, value in hub.items() if value is not None}
        model, tokenizer = loading.load_pretrained(name, device, dtype, **given, **options)
        lens = cls(model, tokenizer, dtype=dtype, memory_budget=memory_budget, derive=derive)
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
        sources: SourceInput | None = None,
        template: str | None = None,
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
            sources: The columns of the maps as groups of tokens instead of tokens; a cell is the norm of the group's
                summed contributions. Character spans of the text, ``{"question": (0, 40), "document": (40, 900)}``; a
                list or dict of texts, which `template` joins with `text` as the question; "word", "sentence", "line" or
                "token"; or, of a chat, "message". A token belongs to the source that holds its first character that is
                not a space, and all others to "(rest)", the last column.
            template: How sources that are texts make up the input: ``{sources}`` stands for all of them with an empty
                line between, ``{0}``, ``{1}`` or ``{name}`` for one, ``{question}`` for `text`. Default:
                ``"{sources}\n\n{question}"``. In a chat, it fills the last message of the user.
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
        item = encode_one(self.loaded, text, words, chat, text_target, generate, truncation, sources, template)
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
        given = [texts] if isinstance(texts, Mapping) else texts
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
        against: Any = None,
        log_prob: bool = False,
        each: bool = False,
        sources: Any = None,
        template: str | None = None,
        generate: int | None = None,
        truncation: bool = False,
        gate: str = "ig",
        progress: Progress | None = None,
    ) -> Flow:
        """How much of the last hidden states, or of a target, comes from each input token, across all layers.

        Args:
            text: The input, as for `analyze`; for an encoder-decoder, a pair of source and target text.
            words: The input as a list of words instead of `text`.
            chat: The input as a conversation instead of `text`.
            method: One of `normscope.flow.methods.METHODS`, optionally followed by an option: "exact", "decompx:norm",
                "alti", "rollout", "rollout:layer" (or another scope), "globenc", "value_zeroing", "alti_logit" etc.
            target: What to explain; default: none, the flow ends at the last hidden states. A logit: a class (index or
                label), a token (id or text) or the largest logit ("top"). A text of several tokens is the continuation
                of the input: the logits of its tokens, added up. A span: ``slice(a, b)`` or ``Passage("a piece of the
                text")`` is the sum of the logits of the tokens at these positions, each read at the position before it,
                and ``Passage()`` everything that was generated. A difference: a tuple of two logits, texts or spans.
                A vector (d,): the projection of the last layer's state at `position` on it. ``Similarity(other text)``:
                the cosine between the embeddings of two texts.
            position: The position of the logit or state; default: the last token of a causal model, the mask of a
                masked one.
            against: What to subtract from each logit: the largest other logit at the same position ("runner-up"), the
                "mean" of all, or that of a class or token; a text of several tokens is a second continuation.
            log_prob: Explain log-probabilities instead of logits, with the probabilities held: the scores explain the
                logit above its expectation, and the negative entropy is part of the remainder.
            each: Explain every token of a span by itself: scores (targets, inputs), value and remainder (targets,).
            sources: Parts of the input whose scores are added up in `Flow.by_source`, as for `analyze`: character
                spans by name, ``{"question": (0, 40)}``; a list or dict of texts that the template joins; or "token",
                "word", "sentence", "line" or, for a chat, "message".
            template: How sources that are texts are joined, such as ``"{sources}\\n\\n{question}"``.
            generate: Number of tokens that a causal language model generates and appends to the input first; for an
                encoder-decoder without a target text, the maximum number of generated tokens.
            truncation: Truncate an input that is too long, as for `analyze`.
            gate: How the feed-forward's activation is attributed: "ig", "frozen" or "tangent".
            progress: Called with the steps done and the total: tokens to write, layers to read, layers back.

        Returns:
            A Flow: maps from the input to the states after each layer, and the scores of the target.

        Raises:
            NormscopeError: If the input, the method or the target cannot be used with this model.
        """
        request = TargetRequest(target, position, against, log_prob, each)
        check_flow_gate(gate)
        if not is_proved(self.loaded):
            prove(self.loaded)
        with nullcontext() if progress is None else follow_steps(progress, steps_to_freeze(self.loaded, generate)):
            item = encode_one(self.loaded, text, words, chat, None, generate, truncation, sources, template)
            return run_flow(self.loaded, item, method, request, gate, self.workspace)

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
        sources: SourceInput | None = None,
        template: str | None = None,
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
            sources: Groups of tokens as columns, as for `analyze`.
            template: How sources that are texts make up the input, as for `analyze`.
            target: Not accepted, as for `analyze`.

        Returns:
            The number of tokens, bytes and seconds, as rough estimates.

        Raises:
            NormscopeError: As for `analyze`, except for the memory budget.
        """
        _refuse_target(target)
        requests = requests_for(self.loaded, Options(scopes, layers, heads, rows, gate, value_bias))
        item = encode_one(self.loaded, text, words, chat, text_target, None, truncation, sources, template)
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


def _refuse_target(target: Any) -> None:
    if target is not None:
        raise NormscopeError(
            "analyze() and estimate() do not accept target. Use text_target= for the target text of an encoder-decoder "
            "or flow(..., target=...) to explain a logit."
        )
