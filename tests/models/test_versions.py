"""Versions of transformers: too old ones are refused on import, untested ones prove what they load."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

from normscope import Analyzer
from normscope.derivation import prove
from normscope.models import loading, registry, versions
from normscope.models.causal import LLAMA
from normscope.models.earlier import EARLIER, families_in
from normscope.models.registry import FAMILIES
from normscope.models.spec import Attention, Branch, Family
from normscope.models.versions import installed_version, minor_version
from tests.helpers.compare import refused
from tests.helpers.tiny import CONFIGS, inputs, tiny


def fake_installation(folder: Path, version: str) -> dict[str, str]:
    """An environment in which a package of this version, and nothing in it, is installed as transformers."""
    package, about = folder / "transformers", folder / f"transformers-{version}.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    return {"PYTHONPATH": f"{folder}:{Path(versions.__file__).parents[2]}"}


@pytest.mark.parametrize("version", ["4.57.6", "3.0.2"])
@pytest.mark.parametrize(
    "command",
    [
        ["-c", "from normscope import Analyzer"],
        ["-c", "import normscope; normscope.register_family"],
        ["-m", "normscope", "analyze", "A text."],
        ["-m", "normscope", "models"],
    ],
    ids=" ".join,
)
def test_an_old_transformers_is_refused_in_one_sentence(version: str, command: list[str], tmp_path: Path) -> None:
    environment = fake_installation(tmp_path, version)
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"normscope needs transformers 5.0.0 or newer, but {version} is installed: upgrade it with" in last
    if "-m" in command:
        assert last.startswith("error: ")
        assert "Traceback" not in done.stderr


def test_it_is_an_import_error_too() -> None:
    assert issubclass(versions.TransformersVersionError, ImportError)


@pytest.mark.parametrize(
    ("version", "tested"),
    [("5.0.0", True), ("5.0.3", True), ("5.22.0.dev0", True), ("5.23.1", True), ("5.7.0", False), ("5.99.0", False)],
)
def test_a_patch_release_counts_as_tested(version: str, tested: bool) -> None:
    assert versions.is_tested(version) is tested


def test_families_are_as_in_the_version() -> None:
    changed = {family.name for some in EARLIER.values() for family in some}
    assert families_in("5.99.0", FAMILIES) == FAMILIES
    oldest, newest = families_in("5.0.0", FAMILIES), families_in("5.22.2", FAMILIES)
    assert [family.name for family in oldest] == [family.name for family in newest]
    assert {a.name for a, b in zip(oldest, FAMILIES, strict=True) if a != b} <= changed
    names = {version: {one.name for one in families_in(version, FAMILIES)} for version in ("5.9.0", "5.8.1")}
    assert names["5.9.0"] == names["5.8.1"]
    vit = {v: next(f for f in families_in(v, FAMILIES) if f.name == "ViT").stacks[0].layers for v in ("5.8.1", "5.0.0")}
    assert set(vit.values()) == {"encoder.layer.*"}


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "is_tested", lambda version: False)


def planted(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Family:
    """Llama as one of normscope's own families, with the first attention changed."""
    (stack,) = LLAMA.stacks
    first, *others = stack.blocks
    (branch,) = first.branches
    assert isinstance(branch.op, Attention)
    blocks = (replace(first, branches=(Branch(replace(branch.op, **changes), branch.pre),)), *others)
    family = replace(LLAMA, stacks=(replace(stack, blocks=blocks),))
    monkeypatch.setattr(registry, "FAMILIES", (family,))
    return family


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("name", ["bert", "llama", "bart", "whisper", "vit"])
def test_an_untested_version_proves_its_families_and_does_not_warn(name: str) -> None:
    model = tiny(name, dtype=torch.float32)
    lens = Analyzer(model)
    assert not lens.family.derived
    lens.analyze(inputs(name, model))


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("changes", [{"value": "self_attn.v"}, {"value": "self_attn.k_proj"}], ids=str)
def test_a_family_that_does_not_hold_there_is_derived(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, **changes)
    with pytest.warns(UserWarning, match="described by watching it"):
        lens = Analyzer(tiny("llama"))
    assert lens.family.derived
    assert lens.family.stacks == LLAMA.stacks
    refused(lambda: Analyzer(tiny("llama"), derive=False))


@pytest.mark.usefixtures("untested")
def test_what_cannot_be_derived_either_is_refused_with_the_first_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, value="self_attn.v")
    refused(lambda: Analyzer(tiny("llama").train()), "training mode")
    model = tiny("llama")
    model.layers[0].mlp.act_fn.forward = lambda x: x.flip(-1)
    refused(lambda: Analyzer(model), "has no self_attn.v")


def test_the_family_of_a_tested_version_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "is_tested", lambda version: True)
    planted(monkeypatch, value="self_attn.v")
    refused(lambda: Analyzer(tiny("llama")), "has no self_attn.v")


def test_sdpa_that_ignores_the_softcap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gemma2")
    monkeypatch.setattr(registry, "installed_version", lambda: "5.20.2")
    assert not Analyzer(model).family.derived
    model.config._attn_implementation_internal = "sdpa"  # later versions refuse to set it
    refused(
        lambda: Analyzer(model),
        "With transformers 5.20.2, the sdpa attention of Gemma-2 ignores attn_logit_softcapping",
        "attn_implementation='eager'",
    )


@pytest.mark.parametrize(
    ("version", "asked", "used"),
    [
        ("5.20.2", {}, {"attn_implementation": "eager"}),
        ("5.20.2", {"attn_implementation": "flash"}, {"attn_implementation": "flash"}),
        ("5.21.0", {}, {}),
    ],
)
def test_gemma_2_is_loaded_with_eager_attention(
    version: str, asked: dict[str, str], used: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def load(name: str, **options: Any) -> Any:
        given.update(options)
        return None, {"missing_keys": []}

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", load)
    monkeypatch.setattr(versions, "installed_version", lambda: version)
    config = AutoConfig.for_model("gemma2", **CONFIGS["gemma2"])
    loading._load_weights("name", config, "AutoModel", None, dict(asked))
    assert {key: value for key, value in given.items() if key == "attn_implementation"} == used


@pytest.mark.skipif(minor_version(installed_version()) >= (5, 1), reason="only the first version of transformers 5")
def test_a_private_table_of_attentions_is_refused() -> None:
    model = AutoModel.from_config(AutoConfig.for_model("modernbert", **CONFIGS["modernbert"])).eval()
    refused(lambda: Analyzer(model), "looks its attention up in a table of its own", "upgrade transformers")


def test_the_installed_version_is_that_of_the_package() -> None:
    assert installed_version() == transformers.__version__
