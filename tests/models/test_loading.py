"""A model loaded by name keeps its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from normscope import Analyzer, NormscopeError, default_model
from normscope.corpus.fingerprints import runner_model_fingerprint
from tests.helpers.tiny import tiny


def saved(folder: Path, head: str | None) -> Path:
    """A tiny BERT with the default model's tokenizer."""
    model = tiny("bert", head, vocab_size=30522)
    model.float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        source = Path(default_model.find()) / name
        if source.is_file():
            (folder / name).write_bytes(source.read_bytes())
    return folder


@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification", "TokenClassification"])
def test_heads(tmp_path: Path, head: str) -> None:
    lens = Analyzer.from_pretrained(saved(tmp_path, head))
    assert type(lens.model).__name__ == f"BertFor{head}"
    assert lens.analyze("A text.").scopes


def test_a_missing_head_is_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path, "MaskedLM")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if not name.startswith("cls.")},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert type(Analyzer.from_pretrained(folder).model).__name__ == "BertModel"


def test_a_pooler_that_is_random_at_each_load_does_not_make_another_model(tmp_path: Path) -> None:
    folder = saved(tmp_path, "MaskedLM")
    first, second = (runner_model_fingerprint(Analyzer.from_pretrained(folder)) for _ in range(2))
    assert first == second
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.0.output.dense.weight"] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert runner_model_fingerprint(Analyzer.from_pretrained(folder)) != first


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder"])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(NormscopeError, match=f"{name}.: there is no such folder. Pass a hub name"):
        Analyzer.from_pretrained(name)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trust_remote_code": True}, "trust_remote_code=True is refused: normscope runs no code"),
        ({"use_safetensors": False}, "use_safetensors=False is refused"),
        ({"torch_dtype": "auto"}, r"takes no torch_dtype\. .*dtype=torch\.float32"),
        ({"config": None}, "takes no config"),
    ],
    ids=str,
)
def test_options_that_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NormscopeError, match=reason):
        Analyzer.from_pretrained(default_model.find(), **options)


def test_redundant_loading_options_are_accepted(tmp_path: Path) -> None:
    lens = Analyzer.from_pretrained(saved(tmp_path, None), trust_remote_code=False, use_safetensors=True)
    assert lens.analyze("A text.").scopes


def test_a_subfolder(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    saved(tmp_path / "inside", "MaskedLM")
    lens = Analyzer.from_pretrained(tmp_path, subfolder="inside", local_files_only=True)
    assert type(lens.model).__name__ == "BertForMaskedLM"
    assert lens.tokenizer.mask_token == "[MASK]"


def test_options_go_where_they_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, "MaskedLM")
    seen: dict[str, dict[str, Any]] = {}
    for name in ("AutoConfig", "AutoModelForMaskedLM", "AutoTokenizer"):
        kind = getattr(transformers, name)

        def watched(*args: Any, _name: str = name, _load: Any = kind.from_pretrained, **options: Any) -> Any:
            seen.setdefault(_name, options)  # they call one another
            dropped = ("revision", "token", "proxies")
            return _load(*args, **{key: value for key, value in options.items() if key not in dropped})

        monkeypatch.setattr(kind, "from_pretrained", watched)
    hub = {"revision": "main", "token": "secret", "proxies": {}, "cache_dir": str(tmp_path / "cache")}
    Analyzer.from_pretrained(folder, **hub, use_fast=True, attn_implementation="sdpa")  # type: ignore[arg-type]
    assert seen["AutoConfig"] == hub
    assert seen["AutoTokenizer"] == {**hub, "use_fast": True}
    model = seen["AutoModelForMaskedLM"]
    assert hub.items() <= model.items()
    assert model["attn_implementation"] == "sdpa"
    assert model["use_safetensors"] is True
    assert "use_fast" not in model
