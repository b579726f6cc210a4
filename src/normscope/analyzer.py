"""Analyzer: the front door. A model and its tokenizer; text in, Analysis out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from normscope import default_model, inputs
from normscope._version import __version__
from normscope.analysis import Analysis, HeadMaps, Label, Measured
from normscope.collect import Collected, Request
from normscope.decompose import walk
from normscope.decompose.scratch import Scratch
from normscope.decompose.walk import Options
from normscope.errors import NormscopeError
from normscope.estimate import GROUP_TOKENS, Estimate, Shape, default_budget, estimate, refuse_over_budget
from normscope.inputs import Input, Limits
from normscope.models import depth_of, family_of, max_positions, padding_id
from normscope.models.spec import Norm
from normscope.records import LayerRecord, select_items, select_rows
from normscope.scopes import Step, aliases_of, resolve, steps_of
from normscope.trace import layer_modules, trace

Progress = Callable[[int, int], None]
GATES = ("ig", "tangent")
VALUE_BIASES = ("token", "remainder")
KEPT_SCRATCH = 64 * 2**20  # working memory kept between runs at the most
INCOMPLETE = 1e-2  # contributions that miss the model's vector by this much are no decomposition of it


class Analyzer:
    """Norm-based analysis of one model, which is left exactly as it was found.

    `tokenizer` may be None: inputs are then encodings and tokens their ids. `dtype` is that of the decomposition
    (default: the model's, at least float32); `memory_budget` in bytes bounds what an analysis may take.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self.family = family_of(model)
        self.model = model
        self.base: PreTrainedModel = model.base_model  # type: ignore[assignment]
        self.tokenizer = tokenizer
        self.depth = depth_of(self.family, self.base.config)
        self.steps = steps_of(self.family.blocks)
        self.model_name = str(getattr(model, "name_or_path", "") or type(model).__name__)
        self.dtype = _dtype(dtype, self.base.dtype)
        self.memory_budget = memory_budget
        self._free: list[Scratch] = []  # working memory of finished runs
        inputs.check_tokenizer(tokenizer, self.limits.vocabulary)

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
        try:
            model, loading = AutoModel.from_pretrained(
                name, dtype=dtype or torch.float32, use_safetensors=True, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # transformers, huggingface_hub, safetensors and tokenizers each have their own
            raise NormscopeError(
                f"Cannot load a model from {name!r}: {(str(error).strip() or type(error).__name__).splitlines()[0]} "
                "Give a hub name or the path of a folder with config.json, model.safetensors and a tokenizer."
            ) from error
        missing = sorted(key for key in loading["missing_keys"] if not key.startswith("pooler."))
        if missing:
            raise NormscopeError(
                f"The checkpoint {name!r} lacks {len(missing)} weights of the model, such as {missing[0]}: they would "
                "be random numbers. Get the whole checkpoint."
            )
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise NormscopeError(f"There is no tokenizer in {name!r}: only special tokens are known. Add its files.")
        try:
            model = model.to(device or "cpu").eval()
        except (RuntimeError, AssertionError) as error:
            raise NormscopeError(f"Cannot move the model to {device!r}: {str(error).splitlines()[0]}") from error
        lens = cls(model, tokenizer, dtype=dtype, memory_budget=memory_budget)
        lens.model_name = default_model.NAME if default_model.is_in(name) else name
        return lens

    @cached_property
    def limits(self) -> Limits:
        embedding: Any = self.base.get_input_embeddings()
        config = self.base.config
        return Limits(
            vocabulary=int(embedding.num_embeddings),
            positions=max_positions(self.family, self.base),
            position_rows=int(getattr(config, self.family.positions)),
            token_types=int(getattr(config, "type_vocab_size", 1)),
            keys=frozenset(inspect.signature(self.base.forward).parameters),
            pad=padding_id(self.base),
        )

    @cached_property
    def _shape(self) -> Shape:
        layer = layer_modules(self.base, self.family)[0]
        return Shape(
            width=int(self.base.config.hidden_size),
            heads=self.head_count,
            hidden=max(module.out_features for module in layer.modules() if isinstance(module, torch.nn.Linear)),
            layers=self.depth,
        )

    @property
    def head_count(self) -> int:
        return int(self.base.config.num_attention_heads)

    def analyze(
        self,
        text: Input | None = None,
        *,
        words: Sequence[str] | None = None,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        heads: bool | Iterable[int] = False,
        rows: Iterable[int] | int | None = None,
        truncation: bool = False,
        gate: str = "ig",
        value_bias: str = "token",
        progress: Progress | None = None,
    ) -> Analysis:
        """The maps of one input: a text, a pair ``(a, b)``, ``words=[...]`` or a dict of input_ids, attention_mask, ...

        `scopes`, `layers` and `rows` (output positions, negative from the end) limit what is computed; `heads` adds
        head-level maps, of all heads or of those listed. `truncation` cuts an input that is too long.
        """
        request = self._request(scopes, layers, heads, rows, gate, value_bias)
        return self._run([self._item(text, words, truncation)], request, progress)[0]

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
    ) -> Iterator[Analysis]:
        """Many inputs, batched by length, yielded in order; each equals `analyze` of it alone.

        An input is anything that `analyze` takes, or a list of words; an encoding of several inputs counts as those.
        """
        request = self._request(scopes, layers, heads, rows, gate, value_bias)
        (size,) = _integers("batch_size", batch_size)
        if size < 1:
            raise NormscopeError(f"batch_size must be an integer of at least 1, not {batch_size!r}.")
        if isinstance(texts, str):
            raise NormscopeError("stream() takes many texts; for one, use analyze(text) or stream([text]).")
        if not isinstance(texts, Iterable):
            raise NormscopeError(f"stream() takes many inputs, such as a list of texts, not {type(texts).__name__}.")
        given = iter([texts] if isinstance(texts, Mapping) else texts)
        items = (item for one in given for item in inputs.encode(one, self.tokenizer, self.limits, truncation))
        # A window of several batches is sorted by length, so that little is padded and little is held back.
        while window := list(islice(items, 8 * batch_size)):
            kinds: dict[frozenset[str], list[int]] = {}  # what is in one batch must have the same keys
            for n in sorted(range(len(window)), key=lambda n: -len(window[n])):
                kinds.setdefault(frozenset(window[n].tensors), []).append(n)
            done: dict[int, Analysis] = {}
            for order in kinds.values():
                for start in range(0, len(order), batch_size):
                    batch = order[start : start + batch_size]
                    done |= zip(batch, self._run([window[n] for n in batch], request, None), strict=True)
            for n in range(len(window)):
                yield done.pop(n)

    def estimate(
        self,
        text: Input | None = None,
        *,
        words: Sequence[str] | None = None,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        heads: bool | Iterable[int] = False,
        rows: Iterable[int] | int | None = None,
        truncation: bool = False,
    ) -> Estimate:
        """Memory and time that `analyze` with the same arguments will take, without running it."""
        request = self._request(scopes, layers, heads, rows, "ig", "token")
        return self._estimate([self._item(text, words, truncation)], request)

    def _item(self, text: Input | None, words: Sequence[str] | None, truncation: bool) -> inputs.Item:
        if (text is None) == (words is None):
            raise NormscopeError("Give one input: a text, a pair (a, b), an encoding, or words=[...].")
        if words is not None:
            text = list(words) if hasattr(words, "__iter__") else []
            if isinstance(words, str) or not hasattr(words, "__iter__") or not all(isinstance(w, str) for w in text):
                raise NormscopeError("words must be a list of strings, such as ['Colin', 'plays'].")
        elif isinstance(text, list):
            raise NormscopeError(
                "A list is ambiguous: use words=[...] for one sentence of words, stream([...]) for many."
            )
        items = inputs.encode(text, self.tokenizer, self.limits, truncation)
        if len(items) != 1:
            raise NormscopeError(f"The encoding holds {len(items)} inputs; analyze() takes one. Use stream(encoding).")
        return items[0]

    def _request(
        self,
        scopes: Iterable[str] | str | None,
        layers: Iterable[int] | int | None,
        heads: bool | Iterable[int],
        rows: Iterable[int] | int | None,
        gate: str,
        value_bias: str,
    ) -> Request:
        self._refuse_training()
        if gate not in GATES:
            raise NormscopeError(f"Unknown gate {gate!r}. Known: {', '.join(GATES)}.")
        if value_bias not in VALUE_BIASES:
            raise NormscopeError(f"Unknown value_bias {value_bias!r}. Known: {', '.join(VALUE_BIASES)}.")
        names = resolve(scopes, self.family.blocks)
        chosen = _indices("layer", layers, self.depth)
        options = Options(
            gate=gate,  # type: ignore[arg-type]
            value_bias=value_bias,  # type: ignore[arg-type]
            heads=() if heads is False else _indices("head", None if heads is True else heads, self.head_count),
        )
        return Request(
            scopes=names,
            layers=tuple(sorted(set(chosen))),
            rows=None if rows is None else tuple(_integers("row", rows)),
            options=options,
            steps=_reach(self.steps, names),
        )

    def _refuse_training(self) -> None:
        if any(module.training for module in self.model.modules()):
            raise NormscopeError("The model is in training mode: dropout would change every number. Call model.eval().")

    def _estimate(self, items: Sequence[inputs.Item], request: Request) -> Estimate:
        return estimate(
            [len(item) for item in items],
            None if request.rows is None else len(request.rows),
            self._shape,
            request.steps,
            len(request.scopes),
            len(request.layers),
            len(request.options.heads),
            self.dtype,
            request.options.block_bytes,
        )

    def _run(self, items: Sequence[inputs.Item], request: Request, progress: Progress | None) -> list[Analysis]:
        """One forward pass over a batch; each layer is decomposed as soon as it is done."""
        budget = default_budget() if self.memory_budget is None else self.memory_budget
        refuse_over_budget(self._estimate(items, request), budget)
        geometry = [_geometry(item, request.rows) for item in items]
        positions = None if request.rows is None else torch.stack([g.positions for g in geometry]).to(self.base.device)
        longest = max(len(item) for item in items)
        collected = Collected(request, len(items), longest, self.dtype)
        group = max(1, GROUP_TOKENS // longest)
        scratch = self._free.pop() if self._free else Scratch()

        def on_layer(record: LayerRecord) -> None:
            for start in range(0, len(items), group):
                some = slice(start, start + group)
                rows = None if positions is None else positions[some]
                part = select_rows(select_items(record, some), rows)
                places = [walk.Item(g.columns, g.rows) for g in geometry[some]]
                found, heads = walk.measure(part, request.steps, request.scopes, places, rows, request.options, scratch)
                collected.put(request.layers.index(record.index), some, found, heads, rows)
            if progress is not None:
                progress(request.layers.index(record.index) + 1, len(request.layers))

        batch = inputs.collate(items, self.limits.pad, self.base.device)
        try:
            trace(self.base, self.family, batch, self.steps[: len(request.steps)], request.layers, on_layer, self.dtype)
        finally:
            scratch.trim(KEPT_SCRATCH)
            self._free.append(scratch)
        return [
            self._analysis(item, request, g, collected, n)
            for n, (item, g) in enumerate(zip(items, geometry, strict=True))
        ]

    def _analysis(
        self, item: inputs.Item, request: Request, geometry: _Geometry, collected: Collected, number: int
    ) -> Analysis:
        side = "encoder"
        labels = [Label(token, side, n) for n, token in enumerate(item.tokens)]
        columns = tuple(labels[n] for n in geometry.real.tolist())
        rows = columns if request.rows is None else tuple(labels[n] for n in geometry.positions.tolist())
        measured, heads, value_norms = collected.item(number, geometry.rows, geometry.columns)
        if request.options.gate == "ig":
            self._refuse_incomplete(measured, request)

        def on_demand(scope: str, layer: int, chosen: Sequence[int] | None) -> walk.Vectors:
            places = range(len(rows)) if chosen is None else _within("row", chosen, len(rows))
            return self._vectors(item, request, scope, layer, [rows[n].position for n in places])

        words = item.word_ids
        return Analysis(
            measured=measured,
            rows=rows,
            columns=columns,
            layers=request.layers,
            aliases=aliases_of(self.family.blocks),
            heads=HeadMaps(heads, aliases_of(self.family.blocks)),
            value_norms=value_norms,
            head_indices=request.options.heads,
            word_ids=None if words is None else tuple(words[label.position] for label in columns),
            info={
                "model": self.model_name,
                "family": self.family.name,
                "dtype": str(self.dtype).removeprefix("torch."),
                "model_layers": self.depth,
                "model_heads": self.head_count,
                "gate": request.options.gate,
                "value_bias": request.options.value_bias,
                "complete": request.options.gate != "tangent",
                "normscope": __version__,
                "transformers": transformers.__version__,
                "torch": str(torch.__version__),
            },
            _parts=on_demand,
        )

    def _refuse_incomplete(self, found: Mapping[str, Measured], request: Request) -> None:
        for scope, measured in found.items():
            worst = int(measured.completeness.argmax())
            if not float(measured.completeness[worst]) <= INCOMPLETE:
                raise NormscopeError(
                    f"The contributions at {scope}, layer {request.layers[worst]} (counted from 0), miss the model's "
                    f"own vector by {float(measured.completeness[worst]):.1e} of its length: this model does not "
                    f"compute what the family {self.family.name} says, so its maps would be wrong. "
                    f"Is {type(self.model).__name__} a modified {self.family.name}?"
                )

    def _vectors(
        self, item: inputs.Item, request: Request, scope: str, layer: int, positions: Sequence[int]
    ) -> walk.Vectors:
        """Run the model again and keep the contribution vectors of one scope and layer at some positions."""
        self._refuse_training()
        found: list[walk.Vectors] = []
        at = torch.tensor([list(positions)], device=self.base.device)
        place = walk.Item(_geometry(item, None).columns, slice(None))
        steps = _reach(self.steps, [scope])

        def on_layer(record: LayerRecord) -> None:
            found.append(walk.vectors(select_rows(record, at), steps, scope, place, at, request.options))

        batch = inputs.collate([item], self.limits.pad, self.base.device)
        trace(self.base, self.family, batch, steps, [layer], on_layer, self.dtype)
        return found[0]


@dataclass(frozen=True)
class _Geometry:
    """Where the real tokens of an item are."""

    real: Tensor  # positions that are not masked
    columns: slice | Tensor
    rows: slice | Tensor
    positions: Tensor  # of the rows


def _geometry(item: inputs.Item, rows: Sequence[int] | None) -> _Geometry:
    real = item.real.nonzero().flatten()
    whole = len(real) == len(item)
    columns: slice | Tensor = slice(0, len(item)) if whole else real
    if rows is None:
        return _Geometry(real, columns, columns, real)
    chosen = _within("row", rows, len(real))
    return _Geometry(real, columns, slice(None), real[torch.tensor(chosen)])


def _reach(steps: Sequence[Step], scopes: Iterable[str]) -> tuple[Step, ...]:
    """The steps up to the last wanted scope (and the norm after a residual: it reads the model's own sum)."""
    wanted = set(scopes)
    last = max(n for n, step in enumerate(steps) if {step.norms, step.weights} & wanted)
    if steps[last].part is None and last + 1 < len(steps) and isinstance(steps[last + 1].part, Norm):
        last += 1
    return tuple(steps[: last + 1])


def _dtype(wanted: torch.dtype | None, model: torch.dtype) -> torch.dtype:
    if wanted is not None and not isinstance(wanted, torch.dtype):
        raise NormscopeError(f"dtype is torch.float32 or torch.float64, not {type(wanted).__name__} {wanted!r}.")
    dtype = wanted or (torch.float64 if model == torch.float64 else torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise NormscopeError(f"Decompositions run in float32 or float64, not {str(dtype).removeprefix('torch.')}.")
    return dtype


def _integers(what: str, given: Any) -> list[int]:
    """A list of integers, given as one, as any iterable of them, or as an array of NumPy or PyTorch."""
    values = given.tolist() if hasattr(given, "tolist") else given
    listed: list[Any] = list(values) if hasattr(values, "__iter__") else [values]
    if not listed:
        raise NormscopeError(f"No {what} was asked for: {what}s=[] is empty.")
    listed = [entry.tolist() if hasattr(entry, "tolist") else entry for entry in listed]
    for entry in listed:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise NormscopeError(f"A {what} is an integer, not {type(entry).__name__} {entry!r}.")
    return listed


def _within(what: str, given: Iterable[int] | int, size: int) -> list[int]:
    """Indices counted from 0 (negative: from the end), checked."""
    listed = _integers(what, given)
    for entry in listed:
        if not -size <= entry < size:
            raise NormscopeError(f"There is no {what} {entry}: valid are 0 to {size - 1} (or -{size} to -1).")
    return [entry % size for entry in listed]


def _indices(what: str, given: Iterable[int] | int | None, size: int) -> tuple[int, ...]:
    return tuple(range(size)) if given is None else tuple(_within(what, given, size))
