"""Results as objects: like a dict by scope, one line of text, copies and pickles, one layer, words and tables."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch

import normscope
from normscope import Analysis, Analyzer, EncoderDecoderAnalysis, NormscopeError
from normscope.word_level import BLOCK
from tests.helpers.compare import assert_equal
from tests.helpers.toys import (
    SCOPES,
    SOURCE,
    TARGET,
    TEXT,
    speaker,
    toy_analysis,
    toy_lens,
    toy_translation,
    translator,
)

# --- like a dict -----------------------------------------------------------------------------------------------------


def test_scopes_are_keys() -> None:
    result = toy_analysis()
    assert list(result) == list(result.keys()) == list(result.scopes) == list(SCOPES)
    assert len(result) == len(SCOPES)
    assert all(torch.equal(maps, result[scope]) for scope, maps in dict(result).items())
    for scope in ("layer", "LAYER", "attn-n", "ATTN-N", " ATTN-N "):
        assert scope in result
    for other in ("nothing", "XATTN-N", 3, None):
        assert other not in result


def test_scopes_of_both_sides() -> None:
    result = toy_translation()
    assert list(result) == list(result.keys()) == list(result.scopes)
    assert len(result) == len(result.scopes)
    assert "XATTN-N" in result
    assert "layer" in result
    assert "nothing" not in result
    assert torch.equal(result.at("XATTN-N", 1), result["XATTN-N"][1])
    assert toy_translation(scopes="XATTN-N").has("XATTN-N")


def test_heads_by_alias() -> None:
    heads = toy_analysis(heads=True).heads
    for name in ("attention", "weights", "attn-w", "ATTN-N", " Attention"):
        assert name in heads
        assert torch.equal(heads.get(name), heads[name])
    for other in ("layer", "x", 3, None):
        assert other not in heads
        assert heads.get(other) is None  # type: ignore[arg-type]
    assert heads.get("layer", 5) == 5
    assert "attention" not in toy_analysis().heads
    assert toy_analysis().heads.get("attention") is None


def test_one_layer_of_those_asked_for() -> None:
    some = toy_analysis(layers=[1], scopes="layer")
    assert torch.equal(some.at("layer", layer=1), some["layer"][0])
    torch.testing.assert_close(some.at("layer", 1), toy_analysis()["layer"][1])
    with pytest.raises(NormscopeError, match="Layer 0 is not in this analysis"):
        some.at("layer", 0)
    with pytest.raises(NormscopeError, match="No scope"):
        some.at("ATTN-N", 1)


# --- one line --------------------------------------------------------------------------------------------------------


def test_reprs_are_one_line() -> None:
    lens = toy_lens()
    assert repr(lens).startswith("Analyzer(model=")
    assert "2 encoder layers, float64, device='cpu')" in repr(lens)
    assert repr(toy_analysis(layers=[1], rows=[0])).startswith("Analysis(model=")
    assert "8 scopes, 1 layer, 1 x 11 tokens, completeness error" in repr(toy_analysis(layers=[1], rows=[0]))
    assert repr(toy_translation()).startswith("EncoderDecoderAnalysis(model=")
    assert repr(lens.flow(TEXT)).startswith("Flow(method='exact', model=")
    for one in (lens, toy_analysis(), toy_translation(), lens.flow(TEXT), speaker().flow("the cat", target="top")):
        assert "\n" not in repr(one)
        assert len(repr(one)) < 400


def test_lazy_names_complete() -> None:
    assert {"Analyzer", "Analysis", "EncoderDecoderAnalysis", "Flow", "register_family", "register_measure"} <= set(
        dir(normscope)
    )
    assert {"run", "open", "read", "measures"} <= set(dir(normscope.corpus))
    for name in normscope.__all__:
        assert getattr(normscope, name) is not None
    for module, old in ((normscope, "register"), (normscope.corpus, "register")):
        assert not hasattr(module, old)


# --- copies and pickles ----------------------------------------------------------------------------------------------


def test_pickled_without_its_model() -> None:
    result = toy_analysis(heads=True)
    again: Analysis = pickle.loads(pickle.dumps(result))
    assert_equal(again, result)
    assert "attention" in again.heads
    with pytest.raises(NormscopeError, match="need the model"):
        again.vectors("layer", 0)
    assert result.vectors("layer", 0, [0]).shape[0] == 1  # the one that was pickled still has it


def test_copied_with_its_model() -> None:
    result = toy_analysis(heads=True)
    shallow, deep = copy.copy(result), copy.deepcopy(result)
    for one in (shallow, deep):
        assert_equal(one, result)
        assert torch.equal(one.vectors("layer", 1, [2]), result.vectors("layer", 1, [2]))
    assert shallow["layer"] is result["layer"]
    deep["layer"].zero_()
    assert result["layer"].any()


def test_both_sides_are_copied_and_pickled() -> None:
    result = toy_translation()
    for one in (pickle.loads(pickle.dumps(result)), copy.copy(result), copy.deepcopy(result)):
        assert isinstance(one, EncoderDecoderAnalysis)
        for side, of in result.sides.items():
            assert_equal(one.side(side), of)


@pytest.mark.parametrize("target", [None, "top"])
def test_flows_are_copied_and_pickled(target: str | None) -> None:
    flow = speaker().flow("the cat sat", target=target)
    for one in (copy.copy(flow), copy.deepcopy(flow), pickle.loads(pickle.dumps(flow)), copy.deepcopy(flow)):
        assert repr(one) == repr(flow)
        assert torch.equal(one.maps, flow.maps)
        assert target is None or torch.equal(one.scores, flow.scores)
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(flow))))
    assert torch.equal(again.maps, flow.maps)


# --- words -----------------------------------------------------------------------------------------------------------


def by_hand(result: Analysis, scope: str, layer: int) -> torch.Tensor:
    """Sum the vectors of a word's tokens, and average the norms over its rows."""
    assert result.word_ids is not None
    groups: dict[Any, list[int]] = {}
    for n, word in enumerate(result.word_ids):
        groups.setdefault(("alone", n) if word is None else word, []).append(n)
    vectors = result.vectors(scope, layer)
    cells = torch.stack([vectors[:, group].sum(1).norm(dim=-1) for group in groups.values()], 1)
    return torch.stack([cells[group].mean(0) for group in groups.values()])


def test_words_are_sums_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    result = toy_analysis()
    assert result.word_ids == (None, 0, 1, 1, 2, 3, 4, 5, 6, 7, None)
    words = result.words()
    assert words.scopes == result.scopes
    assert len(words.rows) == len(words.columns) == 10
    assert words.rows == words.columns
    assert not any("##" in token for token in words.tokens)
    for scope in result.scopes:
        for layer in result.layers:
            if scope.endswith("-N"):
                torch.testing.assert_close(words.at(scope, layer), by_hand(result, scope, layer))
        if scope.endswith("-N"):  # norms of sums are not sums of norms
            assert (words[scope][..., 2].sum(1) < result[scope][..., 2:4].sum((1, 2))).all()
    assert all(float(error.max()) < 1e-5 for error in words.completeness.values())
    monkeypatch.setattr("normscope.word_level.BLOCK", 1)  # a row at a time
    for scope in result.scopes:
        torch.testing.assert_close(result.words()[scope], words[scope])
    assert BLOCK > 1


def test_weights_of_words_need_no_model() -> None:
    result = pickle.loads(pickle.dumps(toy_analysis()))
    words = result.words("ATTN-W")
    merged = result["ATTN-W"].clone()
    merged = torch.cat([merged[..., :2], merged[..., 2:4].sum(-1, keepdim=True), merged[..., 4:]], -1)
    merged = torch.cat([merged[:, :2], merged[:, 2:4].mean(1, keepdim=True), merged[:, 4:]], 1)
    torch.testing.assert_close(words["ATTN-W"], merged)
    torch.testing.assert_close(words.mixing_ratio("ATTN-W"), 1 - merged.diagonal(dim1=1, dim2=2))
    with pytest.raises(NormscopeError, match="need the model"):
        result.words()


def test_words_without_subwords_are_the_tokens() -> None:
    result = toy_analysis(layers=[1])
    alone = result.words(word_ids=[None] * 11)
    for scope in result.scopes:
        torch.testing.assert_close(alone[scope], result[scope], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone.mixing_ratio(scope), result.mixing_ratio(scope), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone.remainder(scope), result.remainder(scope), rtol=1e-4, atol=1e-5)


def test_some_rows_scopes_and_layers() -> None:
    result = toy_analysis(rows=[3, -1])
    words = result.words(["layer", "attention"], layers=1)
    assert words.scopes == (SCOPES[1], SCOPES[-1])
    assert words.layers == (1,)
    assert len(words.rows) == 2
    whole = toy_analysis().words("layer", 1, word_ids=[None, 0, None, 1, 2, 3, 4, 5, 6, 7, None])
    assert words["layer"].shape == (1, 2, 10)
    assert torch.allclose(words["layer"][0, 1, 0], whole["layer"][0, -1, 0])


def test_words_are_shown_and_saved(tmp_path: Any) -> None:
    words = toy_analysis().words("layer")
    assert "10 x 10 words" in repr(words)
    assert_equal(Analysis.load(words.save(tmp_path / "w.safetensors")), words)  # type: ignore[arg-type]
    assert words.to_html(tmp_path / "w.html").stat().st_size
    with pytest.raises(NormscopeError, match="need the model"):
        words.vectors("layer", 0)


def test_words_of_a_decoder_by_hand() -> None:
    result = translator().analyze(SOURCE, text_target=TARGET)
    assert isinstance(result, EncoderDecoderAnalysis)
    decoder = result.side("decoder")
    ids = [0] * len(decoder.columns)  # equal neighbours of one side are one word: one for each side
    words = decoder.words("layer", 0, word_ids=ids)
    assert [label.side for label in words.columns] == ["decoder", "encoder"]
    summed = decoder.vectors("layer", 0)
    own = [label.side == "decoder" for label in decoder.columns]
    torch.testing.assert_close(words.at("layer", 0)[0, 0], summed[:, own].sum(1).norm(dim=-1).mean())


def test_refused_without_word_ids() -> None:
    result = toy_lens().analyze({"input_ids": [5, 6, 7]})
    with pytest.raises(NormscopeError, match=r"has no word ids.*words\(word_ids="):
        result.words()  # type: ignore[union-attr]
    with pytest.raises(NormscopeError, match="2 entries for 3 columns"):
        result.words(word_ids=[0, 1])  # type: ignore[union-attr]
    with pytest.raises(NormscopeError, match="No scope"):
        toy_analysis().words("nothing")
    with pytest.raises(NormscopeError, match="Layer 7"):
        toy_analysis().words("layer", 7)


# --- tables ----------------------------------------------------------------------------------------------------------

COLUMNS = [
    *("scope", "layer", "output", "input", "output_token", "input_token", "output_side", "input_side"),
    "value",
]


def test_polars() -> None:
    polars = pytest.importorskip("polars")
    result = toy_analysis(layers=[1], rows=[-1, 2])
    frame = result.to_polars()
    assert frame.columns == COLUMNS
    assert len(frame) == len(SCOPES) * 1 * 2 * 11
    one = frame.filter(
        (polars.col("scope") == SCOPES[-1]) & (polars.col("layer") == 1) & (polars.col("output") == 2)
    ).sort("input")
    assert one["value"].to_list() == result.at("layer", 1)[1].tolist()
    assert one["input_token"].to_list() == [label.token for label in result.columns]
    assert set(one["output_token"]) == {result.rows[1].token}


def test_both_sides_in_one_frame() -> None:
    pytest.importorskip("polars")
    result = toy_translation()
    frame = result.to_polars()
    sizes = [sum(one[scope].numel() for scope in one.scopes) for one in result.sides.values()]
    assert len(frame) == sum(sizes)
    assert set(frame["output_side"]) == {"encoder", "decoder"}
    crossing = frame.filter((frame["output_side"] == "decoder") & (frame["input_side"] == "encoder"))
    assert len(crossing)


def test_pandas() -> None:
    pytest.importorskip("pandas")
    result = toy_analysis()
    frame = result.to_pandas()
    assert list(frame.columns) == COLUMNS
    one = frame[(frame.scope == SCOPES[-1]) & (frame.layer == 1)].pivot(index="output", columns="input", values="value")
    assert (one.to_numpy() == result.at("layer", 1).numpy()).all()


def test_xarray() -> None:
    pytest.importorskip("xarray")
    result = toy_analysis(layers=[1])
    found = result.to_xarray()
    assert list(found.data_vars) == list(result.scopes)
    assert dict(found.sizes) == {"layer": 1, "output": 11, "input": 11}
    assert (found["ATTN-N"].sel(layer=1, output=3).to_numpy() == result.at("ATTN-N", 1)[3].numpy()).all()
    assert found["input_token"].to_numpy().tolist() == list(result.tokens)
    assert found.attrs["gate"] == "ig"
    sides = toy_translation().to_xarray()
    assert set(sides) == {"encoder", "decoder"}
    assert set(sides["decoder"]["input_side"].to_numpy().tolist()) == {"encoder", "decoder"}


@pytest.mark.parametrize("package", ["pandas", "polars", "xarray"])
def test_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(NormscopeError, match=rf"needs {package}.*pip install 'normscope\[frames\]'"):
        getattr(toy_analysis(scopes="layer"), f"to_{package}")()


# --- targets ---------------------------------------------------------------------------------------------------------


def test_a_target_is_for_flow() -> None:
    for lens in (translator(), toy_lens()):
        for call in (lens.analyze, lens.estimate):
            with pytest.raises(NormscopeError, match=r"do not accept target.*text_target=.*flow"):
                call("the cat", target="le chat")  # type: ignore[operator]


def test_estimate_takes_a_target_text() -> None:
    long, short = (translator().estimate(SOURCE, text_target=text) for text in (TARGET, "le"))
    assert long.tokens >= short.tokens
    assert long.memory > short.memory


def test_files_of_one_side_are_distinguished(tmp_path: Any) -> None:
    path = toy_analysis().save(tmp_path / "x.safetensors")
    with pytest.raises(NormscopeError, match=r"holds an Analysis.*Read it with Analysis\.load"):
        EncoderDecoderAnalysis.load(path)


def test_the_kind_of_result_can_be_declared_to_a_type_checker() -> None:
    lens: Analyzer[Analysis] = Analyzer[Analysis](toy_lens().model, toy_lens().tokenizer)
    assert lens.analyze(TEXT, scopes="weights").tokens
