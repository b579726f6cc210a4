"""Error messages and warnings for the command line and the viewer.

The library's messages name Python arguments (`truncation=True`) and count layers and positions from 0. A `Wording`
translates them to command-line options, or to the terms of the viewer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wording:
    """Translates messages for one kind of reader."""

    phrases: Mapping[str, str]  # replaced verbatim, before everything else
    arguments: Mapping[str, str] = field(default_factory=dict)  # Python argument -> option
    differences: Mapping[str, str] = field(default_factory=dict)  # entry of a run's manifest -> option
    from_one: bool = False  # layers, rows and positions are counted from 1

    def reword(self, message: str) -> str:
        """The translated message."""
        if self.from_one:
            message = _count_from_one(message)
        for there, here in self.phrases.items():
            message = message.replace(there, here)
        if self.arguments:
            names = "|".join(self.arguments)
            message = re.sub(rf"(?<![\w.-])({names})=(?:{VALUE}|(?!\w))", self._option, message)
        if self.differences:
            message = re.sub(r"\b(\w+\.\w+)(?=: was )", lambda m: self.differences.get(m[1], m[1]), message)
        return message

    def _option(self, match: re.Match[str]) -> str:
        """`gate='ig'` -> `--gate ig`, `heads=True` -> `--heads`, `rows=[...]` -> `--row`."""
        value = match["text"] or match["dtype"]
        return self.arguments[match[1]] + (f" {value}" if value else "")


VALUE = r"'(?P<text>[^']*)'|torch\.(?P<dtype>\w+)|\[[^\]]*\]|True\b"
LAYERS = re.compile(r"options\.layers: was [^;.]*")  # in a run's manifest
INDEX = re.compile(r"There is no (layer|row|position) (-?\d+)(?: in the (?:logits|states))?: valid are 0 to (\d+)")

COMMAND_LINE = Wording(
    phrases={
        "heads=False": "no --heads",
        "a smaller batch_size": "a smaller --batch-size",
        " (truncation=True), or a larger memory_budget": " (--truncate), or a machine with more memory",
        "or ask for truncation=True": "or use --truncate",
        "pass position=, or mask": "pass --position, or mask",
        "give a target, such as 'top'": "give one with --target, such as --target top",
        "leave the target out of flow()": "use `normscope flow` without --target",
        "Leave the target out of flow()": "Use `normscope flow` without --target",
        "leave the masking out": "leave --mask out",
        "leave gold out": "leave --gold out",
        "Use XATTN-N or a later scope": "Use --scope XATTN-N or a later one",
        "Load the model in float32 (or float64: dtype=torch.float64)": "Use --dtype float64",
        "Load the model with dtype=": "Use dtype=",
        "Load the model with another head, such as AutoModelForCausalLM or AutoModelForSequenceClassification": (
            "Choose a --model that has one, such as a classifier or a language model"
        ),
        "Pass notation=": "Pass --reader notation=NAME",
        "name the ones to read, such as text=": "name the ones to read, such as --reader text=",
        "with delimiter=": "with --reader delimiter=",
        "with a larger memory_budget": "with a larger --memory",
        "Unknown value_bias": "Unknown --value-bias",
        "analyze()": "`normscope analyze`",
        "flow()": "`normscope flow`",
    },
    arguments={
        "allow_versions": "--allow-versions",
        "batch_size": "--batch-size",
        "device": "--device",
        "dtype": "--dtype",
        "format": "--format",
        "gate": "--gate",
        "generate": "--generate",
        "heads": "--heads",
        "layers": "--layer",
        "method": "--method",
        "position": "--position",
        "revision": "--revision",
        "rows": "--row",
        "scopes": "--scope",
        "target": "--target",
        "truncation": "--truncate",
        "value_bias": "--value-bias",
    },
    differences={
        "model.name": "--model",
        "model.dtype": "--dtype",
        "model.revision": "--revision",
        "model.fingerprint": "checksum of the model's weights",
        "model.tokenizer": "checksum of the model's tokenizer",
        "model.structure": "checksum of the model's modules",
        "data.path": "DATA",
        "data.fingerprint": "checksum of the entries in DATA",
        "data.entries": "entries in DATA",
        "data.format": "--format",
        "data.options": "--reader",
        "data.limit": "--limit",
        "options.measures": "--measures",
        "options.maps": "--maps",
        "options.scopes": "--scope",
        "options.layers": "--layer",
        "options.truncation": "--truncate",
        "options.mask_seed": "--mask",
        "options.batch_size": "--batch-size",
        "options.shard_size": "--shard-size",
    },
    from_one=True,
)
VIEWER = Wording(
    phrases={  # requests have no such option, or under another name
        ", or ask for truncation=True": "",
        "pass position=, or mask": "choose one, or mask",
    }
)


def missing_layer_wording(layer: int, depth: int) -> str:
    """The error message for a layer, counted from 1, that the model does not have."""
    return f"There is no layer {layer}: this model has layers 1 to {depth}."


def _count_from_one(message: str) -> str:
    """The message with its layers, rows or positions counted from 1."""
    match = INDEX.match(message)
    if match is None:
        return LAYERS.sub(lambda found: re.sub(r"\d+", lambda number: str(int(number[0]) + 1), found[0]), message)
    what, index, size = match[1], int(match[2]), int(match[3]) + 1
    typed = index + 1 if index >= 0 else index
    if what == "layer":
        return missing_layer_wording(typed, size)
    return f"There is no {what} {typed}: valid are 1 to {size} (or -{size} to -1)."
