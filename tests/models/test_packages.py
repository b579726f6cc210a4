"""A missing package that a tokenizer or processor needs is named, with the command that installs it."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from normscope import Analyzer, NormscopeError
from normscope.models import packages
from tests.helpers.tiny import tiny

TRANSLATION, VISION = "pip install 'normscope[translation]'", "pip install 'normscope[vision]'"
TEXTS = ["the cat sat on the mat", "a small house by the sea", "Colin Fleming plays tennis every day"] * 20
LOAD = """
import json, sys

missing, *folders = sys.argv[1:]
sys.modules |= dict.fromkeys(missing.split(","))  # none of them can be imported, nor found
from normscope import Analyzer, NormscopeError

said = []
for folder in folders:
    try:
        said.append(type(Analyzer.from_pretrained(folder).tokenizer).__name__)
    except NormscopeError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def without(missing: str, *folders: Path) -> list[str]:
    """For each folder, the tokenizer's class or the error message when these modules are not installed."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, missing, *map(str, folders)],
        env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def checkpoint(folder: Path, family: str, head: str | None = None) -> Path:
    """A tiny model without a tokenizer."""
    tiny(family, head, dtype=torch.float32).save_pretrained(folder)
    return folder


def sentencepiece(path: Path) -> None:
    pytest.importorskip("sentencepiece")
    from sentencepiece import SentencePieceTrainer

    made = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=made, vocab_size=45, hard_vocab_limit=False, minloglevel=2
    )
    path.write_bytes(made.getvalue())


def marian(folder: Path) -> Path:
    checkpoint(folder, "marian", "Seq2SeqLM")
    sentencepiece(folder / "source.spm")
    (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
    (folder / "vocab.json").write_text(json.dumps({"</s>": 0, "<unk>": 1, "<pad>": 2, "\u2581the": 3}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "fr"}))
    return folder


def llama(folder: Path) -> Path:
    sentencepiece(checkpoint(folder, "llama") / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return folder


def tiktoken(folder: Path) -> Path:
    checkpoint(folder, "llama")
    lines = (f"{base64.b64encode(bytes([n])).decode()} {n}" for n in range(50))
    (folder / "tokenizer.model").write_text("\n".join(lines))
    return folder


def japanese(folder: Path) -> Path:
    tiny("bert", dtype=torch.float32).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"})
    )
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na", encoding="utf-8")
    return folder


def vit(folder: Path) -> Path:
    checkpoint(folder, "vit")
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}})
    )
    return folder


def needs(what: str, package: str, command: str) -> str:
    return f"{what} needs {package}, which is not installed. Install it with: {command}"


def test_without_sentencepiece(tmp_path: Path) -> None:
    """transformers then has no tokenizer for Marian, and takes other files for tiktoken's."""
    folders = (marian(tmp_path / "marian"), llama(tmp_path / "llama"), tiktoken(tmp_path / "tiktoken"))
    said = without("sentencepiece,tiktoken", *folders)
    for folder, error in zip(folders, said, strict=True):
        assert error.startswith(f"Cannot load a model from '{folder}': its tokenizer needs ")
    assert said[0].endswith(needs("its tokenizer", "sentencepiece", TRANSLATION))
    assert said[1].endswith(needs("its tokenizer", "sentencepiece", TRANSLATION))
    assert said[2].endswith(needs("its tokenizer", "tiktoken", "pip install tiktoken"))


def test_without_protobuf_pillow_and_others(tmp_path: Path) -> None:
    folders = (
        marian(tmp_path / "marian"),
        llama(tmp_path / "llama"),
        vit(tmp_path / "vit"),
        japanese(tmp_path / "japanese"),
    )
    said = without("google.protobuf,PIL,fugashi", *folders)
    assert said[0] == "MarianTokenizer"  # which does without protobuf
    assert said[1].endswith(needs("its tokenizer", "protobuf", TRANSLATION))
    assert said[2].endswith(needs("its image processor", "pillow", VISION))
    assert said[3].endswith(needs("its tokenizer", "fugashi", "pip install fugashi"))


def test_loading_with_all_packages_installed(tmp_path: Path) -> None:
    """These checkpoints need no other package."""
    pytest.importorskip("PIL")
    for folder in (marian(tmp_path / "marian"), llama(tmp_path / "llama"), vit(tmp_path / "vit")):
        assert Analyzer.from_pretrained(folder).tokenizer is not None


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ImportError("\nX requires the SentencePiece library but it was not found"), "sentencepiece"),
        (ImportError("X requires the PIL library ... You can install it with pip:\n`pip install pillow`."), "pillow"),
        (ImportError("X requires the Torchvision library but it was not found"), "torchvision"),
        (ModuleNotFoundError("You need to install rjieba to use CpmTokenizer. See https://pypi.org"), "rjieba"),
        (ModuleNotFoundError("The unidic_lite dictionary is not installed. See https://github.com"), "unidic_lite"),
        (ValueError("`tiktoken` is required. Install it with `pip install tiktoken`."), "tiktoken"),
        (ValueError("None could be imported. Missing optional dependencies: torchvision. Please"), "torchvision"),
        (ImportError("Loading a GPTQ quantized model requires optimum (`pip install optimum`)"), "optimum"),
        (ModuleNotFoundError("No module named 'fugashi'"), "fugashi"),
        (RuntimeError("Failed to import x because of: No module named 'google.protobuf'"), None),  # google is there
        (OSError("There is no file named model.safetensors"), None),
        (ValueError("Unknown type: `pip install --upgrade transformers` gets a newer one."), None),  # it is there
    ],
    ids=str,
)
def test_missing_package_from_an_error(error: Exception, package: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_package_installed", lambda name: name in ("transformers", "google"))
    assert packages.missing_package(error) == package


def test_an_import_error_takes_precedence_over_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_package_installed", lambda name: False)
    asked = "You need to install rjieba to use CpmTokenizer."
    assert packages.missing_package(ModuleNotFoundError(asked), ("sentencepiece",)) == "rjieba"
    assert packages.missing_package(ValueError("`pip install tiktoken`"), ("sentencepiece",)) == "sentencepiece"


def test_installed_packages() -> None:
    assert packages.is_package_installed("torch")
    assert not packages.is_package_installed("no-such-package")
    assert not packages.is_package_installed("no_such_package.part")


def test_another_reason_is_passed_on(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(NormscopeError, match="Pass a hub name or the path of a folder") as caught:
        Analyzer.from_pretrained(folder)
    assert "not installed" not in str(caught.value)


def tiny_gguf(folder: Path) -> Path:
    """A Llama of two layers with tied embeddings, whose tokens are letters; like other GGUF files it names no head."""
    gguf = pytest.importorskip("gguf")
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 64, "embedding_length": 16, "block_count": 2, "feed_forward_length": 24}
    for name, size in (sizes | {"head_count": 4, "head_count_kv": 2, "rope_dimension_count": 4}).items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["<s>", "</s>", "<|endoftext|>", "\u0120", *letters, "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    made = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 16), "output_norm": (16,)}
    layer = {"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16)}
    layer |= {"attn_output": (16, 16), "ffn_gate": (24, 16), "ffn_up": (24, 16), "ffn_down": (16, 24)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", made.normal(1.0, 0.5, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_loads_with_its_head(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    path = tiny_gguf(tmp_path)
    for lens in (Analyzer.from_pretrained(path), Analyzer.from_pretrained(tmp_path, gguf_file=path.name)):
        assert type(lens.model).__name__ == "LlamaForCausalLM"
        told = lens.explain("cab dad", generate=3)
        assert len(told.tokens) == 3
        assert float(told.completeness.max()) <= 1e-5


def test_a_gguf_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(NormscopeError, match=r"has no config.json, but a GGUF file.*tiny\.gguf'"):
        Analyzer.from_pretrained(tmp_path)
    monkeypatch.setattr(packages, "is_package_installed", lambda name: name != "gguf")
    with pytest.raises(NormscopeError, match=r"GGUF files need gguf.*pip install gguf"):
        Analyzer.from_pretrained(path)
    monkeypatch.undo()
    pytest.importorskip("gguf")
    with pytest.raises(NormscopeError, match=r"Cannot load a model from .*tiny\.gguf'"):
        Analyzer.from_pretrained(path)
