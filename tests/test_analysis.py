"""Analysis: lookup, labels, vectors on demand, saving and loading."""

import json
import os
import pickle
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from normscope import Analysis, NormscopeError
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.inputs.encode import encode
from normscope.labels import Label
from normscope.saving import FORMAT, FORMAT_WITHOUT_CHECKSUM, tensor_checksum
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.toys import SCOPES, TEXT, some_ids, toy_analysis, toy_lens, toy_translation

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"heads": True},
    {"heads": [3, 1], "rows": [-1, 0], "layers": [1], "scopes": ["weights", "layer"]},
    {"gate": "tangent", "value_bias": "remainder"},
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return toy_analysis(heads=True).save(tmp_path / "x.safetensors")


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_round_trip(options: dict[str, Any], tmp_path: Path) -> None:
    result = toy_analysis(**options)
    path = tmp_path / "x.safetensors"
    assert result.save(path) == path
    loaded = Analysis.load(path)
    assert_equal(loaded, result)
    assert_equal(Analysis.load(str(path)), result)
    again = loaded.save(str(tmp_path / "again.safetensors"))
    assert_equal(Analysis.load(again), result)
    assert sorted(os.listdir(tmp_path)) == ["again.safetensors", "x.safetensors"]


def test_round_trip_without_words_and_with_odd_tokens(tmp_path: Path) -> None:
    result = toy_lens().analyze({"input_ids": some_ids(4, high=20)})
    assert result.word_ids is None
    odd = tuple(Label(token, "encoder", n) for n, token in enumerate(("\u2581é", "\U0001f600", '"\\', "\n")))
    changed = Analysis(result.measured, odd, odd, result.layers, result.aliases, result.heads, info=result.info)
    assert_equal(Analysis.load(changed.save(tmp_path / "x")), changed)


def test_word_ids_keep_none(saved: Path) -> None:
    assert Analysis.load(saved).word_ids == (None, 0, 1, 1, 2, 3, 4, 5, 6, 7, None)


def test_save_replaces_a_file(saved: Path) -> None:
    other = toy_analysis(scopes="weights")
    other.save(saved)
    assert_equal(Analysis.load(saved), other)


def test_saved_file_has_usual_permissions(saved: Path) -> None:
    plain = saved.with_name("plain")
    plain.write_text("")
    assert stat.S_IMODE(saved.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_no_pickle(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "load", never)
    monkeypatch.setattr(torch, "save", never)
    loaded = Analysis.load(saved)
    loaded.save(saved)
    assert saved.read_bytes()[8:9] == b"{"  # safetensors: a length, then a JSON header


def test_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(NormscopeError, match="not a valid safetensors file"):
        Analysis.load(path)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("broken"), OSError(28, "No space left on device"), SafetensorError("full"), KeyboardInterrupt()],
)
def test_failed_save_leaves_no_part_and_the_old_file(
    saved: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def broken(tensors: Any, path: Path, **kwargs: Any) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr("normscope.saving.save_file", broken)
    expected = NormscopeError if isinstance(error, OSError | SafetensorError) else type(error)
    for target in (saved, saved.with_name("new.safetensors")):
        with pytest.raises(expected):
            toy_analysis(scopes="weights").save(target)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_save_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match=r"missing.*does not exist"):
        toy_analysis(scopes="weights").save(tmp_path / "missing" / "x.safetensors")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["x.npz", "x.html", "x.pt", "x.safetensor"])
def test_save_under_the_name_of_another_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match=r"must end in \.safetensors"):
        toy_analysis(scopes="weights").save(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_page_under_the_name_of_another_format(tmp_path: Path) -> None:
    result = toy_analysis(scopes="weights")
    with pytest.raises(NormscopeError, match=r"must end in \.html or \.htm"):
        result.to_html(tmp_path / "x.svg")
    assert os.listdir(tmp_path) == []
    result.to_html(tmp_path / "x.HTML")
    assert os.listdir(tmp_path) == ["x.HTML"]


def test_save_onto_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="is a folder"):
        toy_analysis(scopes="weights").save(tmp_path)


def test_load_missing(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(NormscopeError, match="does not exist"):
            Analysis.load(path)


@pytest.mark.parametrize("size", [0, 4, 8, 100, 3000, -8, -1])
def test_load_truncated(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(NormscopeError, match=r"x\.safetensors"):
        Analysis.load(saved)


@pytest.mark.parametrize(
    "metadata", [None, {"format": "pt"}, {"normscope": "null"}, {"normscope": "5"}, {"normscope": "{}"},
                 {"normscope": '{"format": "normscope-analysis-999"}'}]
)  # fmt: skip
def test_load_foreign(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(3)}, path, metadata=metadata)
    with pytest.raises(NormscopeError, match=FORMAT):
        Analysis.load(path)


def damage(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Change the contents of a file, and its checksum to match."""
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["normscope"])
    tensors = load_file(path)
    change(meta, tensors)
    described = json.dumps(meta)
    save_file(tensors, path, metadata={"normscope": described, "sha256": tensor_checksum(tensors, described)})


KEYS = ("scopes", "rows", "columns", "layers", "aliases", "head_indices", "word_ids", "info")


@pytest.mark.parametrize("key", KEYS)
def test_load_without_a_key(saved: Path, key: str) -> None:
    damage(saved, lambda meta, tensors: meta.pop(key))
    with pytest.raises(NormscopeError, match=key):
        Analysis.load(saved)


@pytest.mark.parametrize("key", KEYS)
def test_load_with_a_key_of_the_wrong_type(saved: Path, key: str) -> None:
    damage(saved, lambda meta, tensors: meta.update({key: 5}))
    with pytest.raises(NormscopeError, match=r"x\.safetensors"):
        Analysis.load(saved)


@pytest.mark.parametrize("name", ["map/ATTN-W", "mixing/ATTNRESLN-N", "remainder/ATTN-N", "completeness/ATTN-N"])
def test_load_without_a_tensor(saved: Path, name: str) -> None:
    damage(saved, lambda meta, tensors: tensors.pop(name))
    with pytest.raises(NormscopeError, match=name):
        Analysis.load(saved)


@pytest.mark.parametrize("key", ["rows", "columns", "layers", "head_indices", "word_ids"])
def test_load_with_labels_that_do_not_fit_the_maps(saved: Path, key: str) -> None:
    damage(saved, lambda meta, tensors: meta[key].pop())
    with pytest.raises(NormscopeError, match=r"x\.safetensors"):
        Analysis.load(saved)


def test_load_with_a_map_of_another_shape(saved: Path) -> None:
    damage(saved, lambda meta, tensors: tensors.update({"map/ATTN-N": torch.ones(2, 3, 3)}))
    with pytest.raises(NormscopeError, match=r"x\.safetensors"):
        Analysis.load(saved)


@pytest.mark.parametrize("metadata", ["{", "", "edb280"])
def test_load_with_metadata_that_is_not_json(saved: Path, metadata: str) -> None:
    save_file(load_file(saved), saved, metadata={"normscope": metadata})
    with pytest.raises(NormscopeError, match=r"x\.safetensors"):
        Analysis.load(saved)


def flipped(whole: bytes, bit: int) -> bytes:
    """The same bytes with one bit changed."""
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def assert_refused_or_same(path: Path, expected: Any) -> bool:
    """True if the file is refused, with its name in the message; otherwise it must hold the same analysis."""
    try:
        found = Analysis.load(path)
    except NormscopeError as error:
        assert path.name in str(error)  # noqa: PT017
        return True
    ours, theirs = (getattr(result, "sides", {"": result}) for result in (found, expected))
    assert list(ours) == list(theirs)
    for side in ours:
        assert_equal(ours[side], theirs[side])
    return False


@pytest.mark.parametrize("part", ["header", "body"])
@pytest.mark.parametrize("sides", [1, 2])
def test_a_flipped_bit_is_noticed(sides: int, part: str, tmp_path: Path) -> None:
    """In every part of the file: the length, the header with its labels and shapes, or the numbers."""
    result: Any = toy_analysis(heads=True) if sides == 1 else toy_translation(heads=True)
    path = result.save(tmp_path / "x.safetensors")
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    first, last = (0, start) if part == "header" else (start, len(whole))
    for bit in random.Random(sides).sample(range(8 * first, 8 * last), 400):
        path.write_bytes(flipped(whole, bit))
        refused = assert_refused_or_same(path, result)
        assert refused or part == "header"
    path.write_bytes(whole)
    assert not assert_refused_or_same(path, result)


def test_a_number_that_was_changed_is_refused(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    tensors["map/ATTN-N"][0, 0, 0] *= 2
    save_file(tensors, saved, metadata=metadata)
    with pytest.raises(NormscopeError, match=r"x\.safetensors is damaged: its contents do not match its checksum"):
        Analysis.load(saved)


@pytest.mark.parametrize("key", ["rows", "info", "word_ids"])
def test_a_label_that_was_changed_is_refused(saved: Path, key: str) -> None:
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    meta = json.loads(metadata["normscope"])
    changed = {
        "rows": [["dog", *meta["rows"][0][1:]], *meta["rows"][1:]],
        "info": meta["info"] | {"model": "other"},
        "word_ids": [0, *meta["word_ids"][1:]],
    }
    metadata["normscope"] = json.dumps(meta | {key: changed[key]})
    save_file(load_file(saved), saved, metadata=metadata)
    with pytest.raises(NormscopeError, match="checksum"):
        Analysis.load(saved)


def test_a_checksum_that_was_removed_is_refused(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        metadata = {"normscope": file.metadata()["normscope"]}
    save_file(load_file(saved), saved, metadata=metadata)
    with pytest.raises(NormscopeError, match="checksum"):
        Analysis.load(saved)


def without_checksum(path: Path) -> None:
    """Turn a file into one of the previous format."""
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["normscope"])
    save_file(load_file(path), path, metadata={"normscope": json.dumps(meta | {"format": FORMAT_WITHOUT_CHECKSUM})})


@pytest.mark.parametrize("sides", [1, 2])
def test_the_format_without_a_checksum_is_read_with_a_warning(sides: int, tmp_path: Path) -> None:
    result: Any = toy_analysis(heads=True) if sides == 1 else toy_translation(heads=True)
    path = result.save(tmp_path / "x.safetensors")
    without_checksum(path)
    with pytest.warns(UserWarning, match=r"x\.safetensors has an older format without a checksum") as caught:
        assert not assert_refused_or_same(path, result)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # where load() was called


# --- lookup ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("weights", "ATTN-W"),
        ("Attention", "ATTN-N"),
        ("ATTENTION-RESIDUAL", "ATTNRES-N"),
        ("attention-block", "ATTNRESLN-N"),
        ("FF", "ATTNRESLNFF-N"),
        ("ff-residual", "ATTNRESLNFFRES-N"),
        ("LaYeR", "ATTNRESLNFFRESLN-N"),
        ("attnresln-n", "ATTNRESLN-N"),
        (" AttnRes-W ", "ATTNRES-W"),
    ],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_names_and_aliases(name: str, scope: str, loaded: bool, saved: Path) -> None:
    result = Analysis.load(saved) if loaded else toy_analysis()
    assert result.resolve(name) == scope
    assert result[name] is result.measured[scope].map
    assert result.mixing_ratio(name) is result.measured[scope].mixing
    assert result.remainder(name) is result.measured[scope].remainder


@pytest.mark.parametrize("loaded", [False, True])
def test_heads_of_a_loaded_analysis(loaded: bool, saved: Path) -> None:
    result = Analysis.load(saved) if loaded else toy_analysis(heads=True)
    assert set(result.heads) == {"ATTN-W", "ATTN-N"}
    assert torch.equal(result.heads["attention"], result.heads["ATTN-N"])
    assert torch.equal(result.heads["Weights"], result.heads["ATTN-W"])


@pytest.mark.parametrize("look", [Analysis.__getitem__, Analysis.mixing_ratio, Analysis.remainder, Analysis.resolve])
def test_unknown_scope(look: Any) -> None:
    result = toy_analysis(scopes=["weights", "layer"])
    with pytest.raises(NormscopeError, match="ATTN-W, ATTNRESLNFFRESLN-N"):
        look(result, "ATTN-N")  # a scope of the model, but not of this analysis
    with pytest.raises(NormscopeError, match=r"Did you mean 'ATTN-W'"):
        look(result, "ATN-W")
    for name in (None, 3, ["layer"]):
        with pytest.raises(NormscopeError, match="A scope is a name"):
            look(result, name)


def test_labels_and_positions() -> None:
    result = toy_analysis(rows=[-1, 2])
    assert result.rows == (Label("[SEP]", "encoder", 10), Label("cat", "encoder", 2))
    assert result.tokens == ("[SEP]", "cat")
    assert [label.position for label in result.columns] == list(range(11))
    assert result["layer"].shape == (2, 2, 11)


def test_layer_position() -> None:
    result = toy_analysis(layers=[1], scopes="weights")
    assert result.layer_position(1) == 0
    for layer in (0, 2, -1):
        with pytest.raises(NormscopeError, match=rf"Layer {layer} .* layers 1"):
            result.layer_position(layer)


def test_info_is_plain(saved: Path) -> None:
    info = toy_analysis(gate="tangent").info
    assert json.loads(json.dumps(dict(info))) == dict(info)
    assert (info["family"], info["dtype"], info["gate"], info["value_bias"]) == ("BERT", "float64", "tangent", "token")
    assert (info["model_layers"], info["model_heads"]) == (2, 4)
    assert info["complete"] is False
    assert toy_analysis().info["complete"] is True


def test_analyses_can_be_compared_and_kept_in_sets() -> None:
    """An analysis holds tensors: comparing it must not fail because their truth value is ambiguous."""
    result = toy_analysis(scopes="weights")
    same = result
    assert result == same
    assert (result == toy_analysis(scopes="weights")) in (True, False)
    assert result in {result}


def test_tensors_can_be_used_in_training() -> None:
    """They are ordinary tensors, also those of layers shown early; so are the model's."""
    lens = toy_lens()
    early: list[Any] = []
    seen: list[bool] = []
    found = run_batch(
        lens.loaded,
        encode(lens.loaded, TEXT),
        requests_for(lens.loaded, Options(heads=True)),
        lens.workspace,
        lambda *_: seen.append(torch.is_inference_mode_enabled()),
        lambda results: early.extend(results()),
    )
    assert (len(early), seen) == (lens.depth - 1, [False] * lens.depth)
    for one in (*early, *found):
        factor = torch.ones(1, requires_grad=True)
        maps = [
            one["layer"],
            one.mixing_ratio("layer"),
            one.remainder("layer"),
            one.heads["attention"],
            one.value_norms,
        ]
        sum((factor * x).square().sum() for x in maps).backward()
        assert factor.grad is not None
        one["layer"].mul_(2)
    lens.loaded.base(input_ids=some_ids(4)[None]).last_hidden_state.sum().backward()


# --- vectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [scope for scope in SCOPES if scope.endswith("-N")])
def test_vectors_have_the_norms_of_the_map(scope: str) -> None:
    result = toy_analysis()
    for layer in (0, 1):
        vectors = result.vectors(scope, layer)
        assert vectors.shape == (11, 11, 24)
        assert_close(vectors.norm(dim=-1), result[scope][layer])


def test_vectors_of_some_rows() -> None:
    full, some = toy_analysis(), toy_analysis(rows=[7, 3, -1], layers=[1])
    expected = full.vectors("layer", 1)
    torch.testing.assert_close(some.vectors("layer", 1), expected[[7, 3, 10]])
    torch.testing.assert_close(some.vectors("layer", 1, rows=[1]), expected[[3]])
    torch.testing.assert_close(some.vectors("layer", layer=1, rows=[-1, 0]), expected[[10, 7]])


@pytest.mark.parametrize("scope", ["ATTN-W", "ATTNRES-W", "weights"])
def test_no_vectors_of_weights(scope: str) -> None:
    with pytest.raises(NormscopeError, match=r"attention weights.*-N scope"):
        toy_analysis().vectors(scope, 0)


@pytest.mark.parametrize("layer", [0, 2, -1, None, "1", [1]], ids=repr)
def test_no_vectors_of_a_layer_that_was_not_analysed(layer: Any) -> None:
    with pytest.raises(NormscopeError, match=r"has the layers 1"):
        toy_analysis(layers=[1]).vectors("layer", layer)


def test_no_vectors_of_a_scope_that_was_not_analysed() -> None:
    with pytest.raises(NormscopeError, match="It holds: ATTN-N"):
        toy_analysis(scopes="attention").vectors("layer", 0)


@pytest.mark.parametrize(
    ("rows", "part"),
    [([11], "0 to 10"), ([-12], "0 to 10"), ([], "is empty"), ([True], "bool"), ([0.0], "float"), ("0", "str")],
)
def test_no_vectors_of_rows_that_are_not_there(rows: Any, part: str) -> None:
    with pytest.raises(NormscopeError, match=part):
        toy_analysis().vectors("layer", 0, rows)


def test_no_vectors_of_a_loaded_analysis(saved: Path) -> None:
    with pytest.raises(NormscopeError, match=r"loaded from a file.*Analyzer\.analyze"):
        Analysis.load(saved).vectors("layer", 0)


# --- both sides of an encoder-decoder --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["marian", "t5", "whisper"])
@pytest.mark.parametrize(
    "options", [{}, {"heads": True}, {"rows": [-1], "layers": [1]}, {"scopes": "XATTN-N"}], ids=str
)
def test_round_trip_of_both_sides(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    result = toy_translation(name, **options)
    path = result.save(tmp_path / "x.safetensors")
    loaded = Analysis.load(path)
    assert isinstance(loaded, EncoderDecoderAnalysis)
    assert list(loaded.sides) == list(result.sides)
    for side, one in result.sides.items():
        assert_equal(loaded.side(side), one)
    assert loaded.info == result.info
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert isinstance(EncoderDecoderAnalysis.load(path), EncoderDecoderAnalysis)


def test_one_side_can_be_saved_alone(tmp_path: Path) -> None:
    result = toy_translation(heads=True)
    for side, one in result.sides.items():
        loaded = Analysis.load(one.save(tmp_path / side))
        assert isinstance(loaded, Analysis)
        assert_equal(loaded, one)


def test_damaged_files_of_both_sides_are_refused(tmp_path: Path) -> None:
    path = toy_translation().save(tmp_path / "x.safetensors")
    whole = path.read_bytes()
    changes: list[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = [
        lambda meta, tensors: tensors.pop("decoder/map/XATTN-N"),
        lambda meta, tensors: meta["sides"]["decoder"]["columns"].pop(),
        lambda meta, tensors: meta["sides"]["encoder"].pop("rows"),
        lambda meta, tensors: meta["sides"].update(middle=meta["sides"].pop("encoder")),
        lambda meta, tensors: meta["sides"].clear(),
        lambda meta, tensors: meta.update(sides=5),
        lambda meta, tensors: meta.update(sides={"decoder": 5}),
        lambda meta, tensors: meta.update(format="normscope-analysis-999"),
    ]
    for change in changes:
        path.write_bytes(whole)
        damage(path, change)
        with pytest.raises(NormscopeError):
            Analysis.load(path)


def test_scopes_are_found_on_the_decoder_first() -> None:
    result = toy_translation()
    assert result.encoder is not None
    assert result.decoder is not None
    assert result["XATTN-N"] is result.decoder["XATTN-N"]
    assert result["ATTN-N"] is result.decoder["ATTN-N"]
    assert result["cross-attention"] is result["XATTN-N"]
    assert result["ATTNRESLNFFRESLN-N"] is result.encoder["layer"]  # the decoder has no scope of this name
    assert result["layer"] is result.decoder["layer"]
    assert result.scopes == (*result.decoder.scopes, *result.encoder.scopes[-3:])
    assert result.mixing_ratio("layer") is result.decoder.mixing_ratio("layer")
    assert result.remainder("XATTN-N") is result.decoder.remainder("XATTN-N")
    assert result.vectors("XATTN-N", 1, [0]).shape == (1, 15, 24)
    assert torch.equal(result.cross("XATTN-N"), result["XATTN-N"][..., 6:])


@pytest.mark.parametrize("name", ["marian", "t5", "whisper"])
@pytest.mark.parametrize("scope", ["XATTN-W", "XATTN-N", "cross-attention"])
def test_cross_attention_alone_has_no_mixing_ratio(name: str, scope: str, tmp_path: Path) -> None:
    """It reads the encoder's tokens only: the ratio would always be 1."""
    result = toy_translation(name)
    assert result.decoder is not None
    residual = result.decoder.aliases["attention-residual"]
    assert residual.endswith("XATTNRES-N")
    said = rf"XATTN-[WN] has no mixing ratio: cross-attention reads only the encoder's tokens.*such as {residual}\."
    for found in (result, result.decoder, Analysis.load(result.save(tmp_path / "x.safetensors"))):
        with pytest.raises(NormscopeError, match=said):
            found.mixing_ratio(scope)
        assert float(found.mixing_ratio(residual).max()) < 1
    assert result.decoder.mixing_scopes == tuple(s for s in result.decoder.scopes if not s.startswith("XATTN"))
    assert result.encoder is not None
    assert result.encoder.mixing_scopes == result.encoder.scopes


def test_a_mixing_ratio_of_cross_attention_in_an_older_file_is_left_out(tmp_path: Path) -> None:
    result = toy_translation()
    path = result.save(tmp_path / "x.safetensors")
    assert "decoder/mixing/XATTN-N" not in load_file(path)

    def add(meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["decoder/mixing/XATTN-N"] = torch.ones_like(tensors["decoder/remainder/XATTN-N"])

    damage(path, add)
    assert not assert_refused_or_same(path, result)


def test_lookups_of_both_sides_that_fail() -> None:
    result = toy_translation(scopes=["XATTN-N"])
    assert result.encoder is None
    with pytest.raises(NormscopeError, match="The encoder was not analysed"):
        result.side("encoder")
    with pytest.raises(NormscopeError, match="'encoder' or 'decoder', not 'left'"):
        result.side("left")
    with pytest.raises(NormscopeError, match=r"Did you mean 'XATTN-N'\? It holds: decoder: XATTN-N\."):
        result["XATN-N"]
    with pytest.raises(NormscopeError, match="A scope is a name"):
        result[3]  # type: ignore[index]
    with pytest.raises(NormscopeError, match="an encoder, a decoder or both"):
        EncoderDecoderAnalysis()


def test_info_of_both_sides_is_what_they_share() -> None:
    info = toy_translation("t5").info
    assert info["family"] == "T5"
    assert info["dtype"] == "float64"
    assert "side" not in info
    assert "model_layers" not in info  # 2 and 3
    assert toy_translation("marian").info["model_layers"] == 2


def test_plot_and_page_of_both_sides(tmp_path: Path) -> None:
    result = toy_translation()
    assert result.plot("XATTN-N", 1).get_title() == "XATTN-N, layer 2"
    assert len(result.plot(side="encoder", scope="layer", layer=0).get_xticklabels()) == 9
    assert len(result.plot("layer", 0).get_xticklabels()) == 15
    with pytest.raises(NormscopeError, match="No scope"):
        result.plot("XATTN-N", 1, side="encoder")
    assert "decoder" in result.to_html(tmp_path / "x.html").read_text()


def test_only_pictures_take_an_image() -> None:
    for given in ({"image": "x.png"}, {"token": "[CLS]"}):
        with pytest.raises(NormscopeError, match="not of an image"):
            toy_analysis(scopes="weights").plot(**given)  # type: ignore[arg-type]
