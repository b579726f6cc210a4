"""Heads come along with a model that is loaded by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from normscope import Analyzer, NormscopeError, default_model
from normscope.corpus.running import model_fingerprint
from tests.tiny import tiny


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


def test_a_head_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path, "MaskedLM")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if not name.startswith("cls.")},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert type(Analyzer.from_pretrained(folder).model).__name__ == "BertModel"


def test_a_pooler_that_is_random_at_each_load_is_no_other_model(tmp_path: Path) -> None:
    folder = saved(tmp_path, "MaskedLM")
    first, second = (model_fingerprint(Analyzer.from_pretrained(folder)) for _ in range(2))
    assert first == second
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.0.output.dense.weight"] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert model_fingerprint(Analyzer.from_pretrained(folder)) != first


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder"])
def test_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(NormscopeError, match=f"{name}.: there is no such folder. Give a hub name"):
        Analyzer.from_pretrained(name)
