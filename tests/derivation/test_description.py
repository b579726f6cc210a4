"""Descriptions as JSON and Python, and the proof of what users register."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import normscope.models.registry
from normscope import Analyzer, NormscopeError, derive
from normscope.cli import app
from normscope.models.description import family_from_json, family_to_json, family_to_python
from normscope.models.registry import FAMILIES, family_of, register_family
from normscope.models.spec import Attention, Block, Branch, Family, Norm
from tests.helpers.compare import refused
from tests.helpers.tiny import FAMILIES as TINY
from tests.helpers.tiny import IMAGES, tiny
from tests.helpers.toys import toy_tokenizer

TEXTS = [name for name in TINY if name not in IMAGES and name != "whisper"]
# Described otherwise than derived, each for a reason.
DIFFERENT = {
    "albert": "derived by group of layers, of which each holds one",
    "gpt_oss": "its experts clamp their gates, which is described by a method",
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normscope.models.registry, "_registered", [])


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in DIFFERENT])
def test_described_families_are_derived(name: str) -> None:
    model = tiny(name)
    assert [_comparable(stack) for stack in derive(model).stacks] == [
        _comparable(stack) for stack in family_of(model).stacks
    ]


def _comparable(stack: Any) -> Any:
    """The stack without what a tiny model does not show: variants it has no layer of, sinks, and copies."""
    blocks = tuple(
        replace(block, branches=tuple(_without_sinks(branch) for branch in block.branches)) for block in stack.blocks
    )
    return stack.side, stack.layers, blocks


def _without_sinks(branch: Branch) -> Branch:
    return replace(branch, op=replace(branch.op, sinks=False)) if isinstance(branch.op, Attention) else branch


@pytest.mark.parametrize("name", [name for name in DIFFERENT if name != "gpt_oss"])
def test_the_others_close_all_the_same(name: str) -> None:
    assert derive(tiny(name)).derived


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_json_and_python_give_the_family_back(family: Family) -> None:
    assert family_from_json(family_to_json(family)) == family
    namespace: dict[str, Any] = {}
    exec(family_to_python(family).replace("import ", "import Refusal, "), namespace)
    assert namespace["FAMILY"] == family


EMPTY = {"type": "Family", "name": "x", "model_types": ["x"], "stacks": [], "attributes": []}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", ("not JSON",)),
        ("nowhere.json", ("Cannot read", "nowhere.json")),
        ({"type": "Familie"}, ("Unknown type 'Familie'", "Known")),
        ({"type": "Family", "nam": "x"}, ("no field 'nam'", "Did you mean 'name'")),
        ({"type": "Family", "name": "x"}, ("incomplete", "model_types")),
        ({"type": "Norm", "path": "x"}, ("a Norm, not of a Family",)),
        ({"type": "Family", "name": "x", "stacks": [{"type": "Stack", "sid": 1}]}, ("stacks[0]", "'sid'")),
        ({**EMPTY, "model_types": "x"}, ("model_types (Family) cannot be 'x'", "tuple[str, ...]")),
        ({**EMPTY, "attributes": [{}]}, ("attributes (Family)", "frozenset[str]")),
        ({**EMPTY, "computed_positions": "yes"}, ("computed_positions", "expected bool")),
        ({**EMPTY, "stacks": [{}]}, ("stacks (Family) cannot be ({},)", "tuple[Stack, ...]")),
        ({**EMPTY, "name": ""}, ("name (Family) is empty",)),
    ],
)
def test_bad_descriptions(given: Any, words: tuple[str, ...]) -> None:
    refused(lambda: family_from_json(given), *words)


@pytest.mark.parametrize("value", [None, True, 7, 0.5, "", [], {}, ["a"], {"type": "Norm", "path": "x"}])
def test_any_field_of_another_type(value: Any) -> None:
    """Each field of a description, replaced: refused, unless the value is one that it may have."""
    known = json.loads(family_to_json(family_of(tiny("llama"))))
    for place in _places(known):
        changed = copy.deepcopy(known)
        *above, last = place
        inside = changed
        for key in above:
            inside = inside[key]
        inside[last] = value
        try:
            register_family(json.dumps(changed))
        except NormscopeError:
            continue
        with suppress(NormscopeError):
            Analyzer(tiny("llama"))


def _places(data: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys and indices of everything in plain data, except in the list of attributes."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, one in items:
        yield (*above, key)
        if key != "attributes":
            yield from _places(one, (*above, key))


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    text = family_to_json(derive(tiny("llama"))).replace("self_attn.v_proj", "self_attn.w_proj")
    (tmp_path / "wrong.json").write_text(text)
    register_family(tmp_path / "wrong.json")
    refused(lambda: Analyzer(tiny("llama")), "no self_attn.w_proj", "Did you mean 'self_attn.v_proj'")


def _planted(name: str, **changes: Any) -> Family:
    """A description with the first attention, or its norm, changed."""
    family = family_of(tiny(name))
    (stack,) = family.stacks
    first, *others = stack.blocks
    branch = first.branches[0]
    pre = changes.pop("pre", branch.pre)
    changed = replace(branch, op=replace(branch.op, **changes), pre=pre)
    blocks = (Block((changed, *first.branches[1:]), first.after), *others)
    return replace(family, name="planted", stacks=(replace(stack, blocks=blocks),))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"value": "self_attn.k_proj"}),
        ("bert", {"value": "attention.self.key"}),
        ("llama", {"pre": Norm("post_attention_layernorm", "rms")}),
        ("gpt2", {"pre": None}),
        ("gpt_neox-sequential", {"packing": "tail"}),
    ],
)
def test_planted_errors_that_maps_alone_do_not_show(name: str, changes: dict[str, Any]) -> None:
    register_family(_planted(name, **changes))
    refused(lambda: Analyzer(tiny(name)))


def test_the_command_prints_python_and_json(tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    shown = CliRunner().invoke(app, ["derive", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("from normscope.models.spec import")
    made = CliRunner().invoke(app, ["derive", str(tmp_path), "--json"])
    assert json.loads(made.stdout)["model_types"] == ["llama"]
    assert family_from_json(made.stdout).stacks == family_of(model).stacks
    missing = CliRunner().invoke(app, ["derive", str(tmp_path / "nothing")])
    assert missing.exit_code == 1
