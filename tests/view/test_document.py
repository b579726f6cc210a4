"""Header and arrays: complete, for every kind of model, and in the order of the format."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from normscope import Analysis, Analyzer, NormscopeError
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.labels import visible_label_text
from normscope.view.document import (
    document_arrays_size,
    document_header,
    document_header_to_json,
    document_map_bytes,
    pack_document,
    sides_of,
)
from normscope.view.log16 import LogRange, decode_log16
from tests.helpers.fakes import NASTY, fake, fake_picture, fake_translation
from tests.helpers.kinds import KINDS, LENSES, result_of
from tests.helpers.tiny import inputs, tiny
from tests.helpers.toys import SCOPES, picture, speaker

KEYS = {"format", "title", "text", "warnings", "model", "encoding", "precision", "sides", "image", "flow"}
SIDE = {
    *("side", "causal", "rows", "columns", "layers", "model_layers", "components", "scopes", "aliases"),
    *("completeness", "mixing", "remainder", "heads", "head_scopes", "grid", "ranges"),
}


def components(side: dict[str, Any]) -> str:
    return " ".join(part["label"] for part in side["components"])


def unpacked(described: dict[str, Any], data: bytes) -> Iterator[tuple[str, str, int, np.ndarray]]:
    """Side, scope, layer and cells of packed data, as a viewer takes it apart."""
    left = np.frombuffer(zlib.decompress(data, -15), "<u2")
    for heads in (False, True):
        for side in described["sides"]:
            shape = (len(side["rows"]), len(side["columns"]))
            if heads:
                shape = (len(side["heads"]), *shape)
            names = [f"heads/{kind}" for kind in side["head_scopes"]] if heads else side["scopes"]
            for scope in names:
                for layer in side["layers"]:
                    codes, left = left[: np.prod(shape)], left[np.prod(shape) :]
                    yield (
                        side["side"],
                        scope,
                        layer,
                        decode_log16(codes, LogRange(*side["ranges"][scope])).reshape(shape),
                    )
    assert not len(left)


@pytest.mark.parametrize("kind", KINDS)
def test_header_of_every_kind(kind: str) -> None:
    result = result_of(kind)
    described = json.loads(document_header_to_json(document_header(result)))
    assert set(described) == KEYS
    assert described["format"] == "normscope-view-1"
    assert described["encoding"] == "float32"
    assert described["precision"] == 0
    assert described["model"]["complete"] is True
    assert described["model"]["family"] == LENSES[kind]().family.name
    assert all(described["model"]["versions"].values())
    for side, (name, one) in zip(described["sides"], sides_of(result).items(), strict=True):
        assert set(side) == SIDE
        assert side["side"] == name
        assert side["scopes"] == list(one.scopes)
        assert side["layers"] == list(one.layers)
        assert side["model_layers"] == 2
        assert [row["token"] for row in side["rows"]] == [visible_label_text(token) for token in one.tokens]
        assert [column["position"] for column in side["columns"]] == [label.position for label in one.columns]
        assert side["heads"] == side["head_scopes"] == []
        for name in ("mixing", "remainder"):
            scopes = one.mixing_scopes if name == "mixing" else one.scopes
            assert list(side[name]) == list(scopes)
            found = np.array([side[name][scope] for scope in scopes])
            expected = np.array([getattr(one.measured[scope], name).numpy() for scope in scopes])
            assert np.allclose(found, expected, rtol=5.1e-4, atol=0)
        drawn = [scope for part in side["components"] for scope in (part["weights"], part["norms"]) if scope]
        assert sorted(drawn) == sorted(one.scopes)


def test_post_ln_encoder() -> None:
    (side,) = document_header(result_of("encoder"))["sides"]
    assert side["side"] == "encoder"
    assert not side["causal"]
    assert components(side) == "ATTN +RES LN FF +RES LN"
    assert [part["block"] for part in side["components"]] == [0, 0, 0, 1, 1, 1]
    assert [part["kind"] for part in side["components"]][:3] == ["attention", "residual", "norm"]
    assert side["components"][0]["weights"] == "ATTN-W"
    assert side["components"][0]["norms"] == "ATTN-N"
    assert [row["token"] for row in side["rows"] if row["special"]] == ["[CLS]", "[SEP]"]
    words = [row["word"] for row in side["rows"]]
    assert words[0] is words[-1] is None
    assert words[2] == words[3] == 1  # cat ##s
    assert side["grid"] is None


def test_pre_ln_causal() -> None:
    (side,) = document_header(result_of("causal"))["sides"]
    assert side["side"] == "decoder"
    assert side["causal"]
    assert components(side) == "LN ATTN +RES LN FF +RES"
    assert [part["block"] for part in side["components"]] == [0, 0, 0, 1, 1, 1]
    assert side["components"][1]["norms"] == "LNATTN-N"
    assert [row["token"] for row in side["rows"] if row["special"]] == ["<s>"]


def test_generated_tokens_are_not_special() -> None:
    (side,) = document_header(speaker().analyze("the cat", generate=4))["sides"]
    special = [row["token"] for row in side["rows"] if row["special"]]
    assert set(special) <= {"<s>", "</s>", "<pad>"}
    assert len(side["rows"]) > 3


def test_encoder_decoder() -> None:
    described = document_header(result_of("encoder-decoder"))
    decoder, encoder = described["sides"]
    assert (decoder["side"], encoder["side"]) == ("decoder", "encoder")
    assert components(decoder) == "ATTN +RES LN XATTN +RES LN FF +RES LN"
    assert components(encoder) == "ATTN +RES LN FF +RES LN"
    assert [column["side"] for column in decoder["columns"]].count("encoder") == len(encoder["rows"])
    source = [column for column in decoder["columns"] if column["side"] == "encoder"]
    assert [column["word"] for column in source] == [0, 1, 2, None]  # the encoder's words
    assert source[-1]["special"]
    assert decoder["rows"][0]["special"]
    cross = next(part for part in decoder["components"] if part["kind"] == "cross-attention")
    assert (cross["weights"], cross["norms"]) == ("XATTN-W", "XATTN-N")
    assert "decoder 6 tokens, 2 layers; encoder 4 tokens, 2 layers" in described["title"]


def test_one_side_of_an_encoder_decoder() -> None:
    result = result_of("encoder-decoder")
    assert isinstance(result, EncoderDecoderAnalysis)
    assert result.decoder is not None
    (side,) = document_header(result.decoder)["sides"]
    assert side["side"] == "decoder"
    assert components(side).count("ATTN") == 2  # of which one is XATTN
    assert {column["side"] for column in side["columns"]} == {"decoder", "encoder"}


def test_vision() -> None:
    described = document_header(result_of("vision"), image=picture())
    (side,) = described["sides"]
    assert side["grid"] == [3, 3]
    assert [row["special"] for row in side["rows"]] == [True] + [False] * 9
    assert described["image"].startswith("data:image/png;base64,")
    assert document_header(result_of("vision"))["image"] is None


def test_large_pictures_become_small() -> None:
    image = np.zeros((3000, 1500, 3), np.uint8)
    assert len(document_header(fake_picture(), image=image)["image"]) < 50_000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt_neox", "LN ATTN LN FF +RES"),
        ("gemma2", "LN ATTN LN +RES LN FF LN +RES"),
        ("dinov2", "LN ATTN × +RES LN FF × +RES"),
        ("opt-post", "ATTN +RES LN FF +RES LN"),
        ("gptj", "LN ATTN LN FF +RES"),
        ("mixtral", "LN ATTN +RES LN FF +RES"),
    ],
)
def test_layers_of_other_families(name: str, expected: str) -> None:
    model = tiny(name)
    (side,) = document_header(Analyzer(model).analyze(inputs(name, model)))["sides"]
    assert components(side) == expected
    if name in ("gpt_neox", "gptj"):
        assert {part["branch"] for part in side["components"]} == {0, 1}


def test_a_family_that_is_not_known_is_spelled_from_its_scopes() -> None:
    (side,) = document_header(fake(info={"model": "m", "family": "Unheard of"}))["sides"]
    assert components(side) == "ATTN +RES LN FF +RES LN"
    assert [part["norms"] for part in side["components"]] == [scope for scope in SCOPES if scope.endswith("-N")]


def test_scopes_that_were_not_asked_for_are_not_promised() -> None:
    lens = LENSES["encoder"]()
    (side,) = document_header(lens.analyze("the cat", scopes=["ATTN-N", "layer"], layers=[1], rows=[0]))["sides"]
    assert side["scopes"] == ["ATTN-N", "ATTNRESLNFFRESLN-N"]
    assert components(side) == "ATTN +RES LN FF +RES LN"
    assert [part["norms"] for part in side["components"]] == ["ATTN-N", None, None, None, None, "ATTNRESLNFFRESLN-N"]
    assert set(side["aliases"].values()) == set(side["scopes"])
    assert side["layers"] == [1]
    assert len(side["rows"]) == 1
    assert len(side["columns"]) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_packed_data_is_whole(kind: str, heads: bool) -> None:
    result = result_of(kind, heads)
    described, data = pack_document(result)
    assert described["encoding"] == "log16"
    assert 0 < described["precision"] < 1e-3
    seen = set()
    for side, scope, layer, found in unpacked(described, data):
        one = sides_of(result)[side]
        maps = one.heads[scope.removeprefix("heads/")] if scope.startswith("heads/") else one[scope]
        expected = maps[one.layers.index(layer)].double().numpy()
        assert np.all(np.abs(found - expected) <= described["precision"] * expected)
        assert np.array_equal(found == 0, expected == 0)
        seen.add((side, scope, layer))
    count = sum(len(one.layers) * (len(one.scopes) + len(one.heads)) for one in sides_of(result).values())
    assert len(seen) == count
    if heads:
        kinds = [side["head_scopes"] for side in described["sides"]]
        assert kinds[0][0] == "ATTN-W"
        assert [len(some) for some in kinds] == ([4, 2] if kind == "encoder-decoder" else [2])


@pytest.mark.parametrize("kind", KINDS)
def test_cells(kind: str) -> None:
    result = result_of(kind, heads=True)
    for side, one in sides_of(result).items():
        for scope in one.scopes:
            found = np.frombuffer(document_map_bytes(result, side, scope), "<f4").reshape(one[scope].shape)
            assert np.array_equal(found, one[scope].float().numpy())
            assert document_map_bytes(result, side, scope, 1) == found[1].tobytes()
        for scope, maps in one.heads.items():
            found = np.frombuffer(document_map_bytes(result, side, f"heads/{scope}", 0), "<f4")
            assert np.array_equal(found, maps[0].float().numpy().ravel())
    assert document_arrays_size(result) >= len(document_map_bytes(result, side, one.scopes[0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "ATTN-N"), "Unknown side 'nowhere'"),
        (("encoder", "NONE-N"), "No scope 'NONE-N'"),
        (("encoder", "heads/ATTN-N"), "no head-level maps"),
        (("encoder", "ATTN-N", 9), "Layer 9"),
    ],
)
def test_missing_cells_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(NormscopeError, match=message):
        document_map_bytes(fake(), *arguments)


def test_nonfinite_numbers_become_null() -> None:
    broken = replace(fake().measured["ATTN-N"], mixing=torch.full((6, 11), torch.nan))
    described = document_header(replace(fake(), measured={"ATTN-N": broken}))
    assert json.loads(document_header_to_json(described))["sides"][0]["mixing"]["ATTN-N"][0][0] is None


def test_maps_that_are_not_finite_are_refused() -> None:
    broken = replace(fake().measured["ATTN-N"], map=torch.full((6, 11, 11), torch.inf))
    with pytest.raises(NormscopeError, match="ATTN-N: The map contains NaN"):
        pack_document(replace(fake(), measured={"ATTN-N": broken}))


def test_tokens_are_shown_with_nothing_hidden() -> None:
    text = document_header_to_json(document_header(fake(NASTY, info={"model": "x\x00<y>"})))
    assert text.isascii()
    described = json.loads(text)
    assert [row["token"] for row in described["sides"][0]["rows"]] == [visible_label_text(token) for token in NASTY]
    assert described["model"]["name"] == r"x\x00<y>"


def test_measures_have_four_digits() -> None:
    (side,) = document_header(fake())["sides"]
    for value in np.ravel(side["mixing"]["ATTN-N"]):
        assert value == float(f"{value:.4g}")


def test_saved_and_loaded(tmp_path: Any) -> None:
    result = result_of("encoder-decoder", heads=True)
    assert pack_document(Analysis.load(result.save(tmp_path / "x.safetensors"))) == pack_document(result)


def test_both_sides_of_a_made_up_translation() -> None:
    decoder, encoder = document_header(fake_translation())["sides"]
    assert [column["token"] for column in decoder["columns"]] == ["le", "chat", "dort", "the", "cat"]
    assert not decoder["rows"][0]["special"]
    assert [row["token"] for row in encoder["rows"]] == ["the", "cat"]
