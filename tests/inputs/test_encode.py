"""The inputs of analyze(): texts, pairs, words and encodings; padding, masks and selections."""

from typing import Any

import numpy as np
import pytest
import torch

from normscope import Analyzer, NormscopeError
from tests.helpers.compare import assert_close, assert_same
from tests.helpers.tiny import BERT_FAMILIES, tiny
from tests.helpers.toys import SCOPES, TEXT, some_ids, toy_lens


def test_text() -> None:
    result = toy_lens().analyze(TEXT)
    assert result.scopes == SCOPES
    assert result.tokens == ("[CLS]", "the", "cat", "##s", "sat", "on", "the", "big", "red", "mat", "[SEP]")
    assert result.rows == result.columns
    assert result.word_ids == (None, 0, 1, 1, 2, 3, 4, 5, 6, 7, None)
    for scope in SCOPES:
        assert result[scope].shape == (2, 11, 11)
        assert bool(torch.isfinite(result[scope]).all())
        assert result.mixing_ratio(scope).shape == result.remainder(scope).shape == (2, 11)
        assert result.completeness[scope].shape == (2,)
        assert float(result.completeness[scope].max()) < 1e-12


def test_pair_has_token_types() -> None:
    lens = toy_lens()
    result = lens.analyze(("a cat", "the dog ran"))
    assert result.tokens == ("[CLS]", "a", "cat", "[SEP]", "the", "dog", "ran", "[SEP]")
    ids = [2, 5, 7, 3, 6, 8, 10, 3]
    assert_same(result, lens.analyze({"input_ids": ids, "token_type_ids": [0, 0, 0, 0, 1, 1, 1, 1]}), 1e-12)
    without = lens.analyze({"input_ids": ids})
    assert not torch.allclose(result["layer"], without["layer"])


def test_words_keep_their_numbers() -> None:
    lens = toy_lens()
    result = lens.analyze(words=["the", "cats", "sat"])
    assert result.tokens == ("[CLS]", "the", "cat", "##s", "sat", "[SEP]")
    assert result.word_ids == (None, 0, 1, 1, 2, None)
    assert_same(result, lens.analyze("the cats sat"), 1e-12)
    assert_same(result, next(iter(lens.stream([["the", "cats", "sat"]]))), 1e-9)


def as_tensors(lens: Analyzer) -> Any:
    return dict(lens.tokenizer(TEXT, return_tensors="pt"))


def as_lists(lens: Analyzer) -> Any:
    return dict(lens.tokenizer(TEXT))


def as_nested_lists(lens: Analyzer) -> Any:
    return dict(lens.tokenizer([TEXT]))


def as_batch_encoding(lens: Analyzer) -> Any:
    return lens.tokenizer(TEXT, return_tensors="pt")


def as_one_dimension(lens: Analyzer) -> Any:
    return {key: value[0] for key, value in lens.tokenizer(TEXT, return_tensors="pt").items()}


def as_numpy(lens: Analyzer) -> Any:
    return dict(lens.tokenizer(TEXT, return_tensors="np"))


def as_ids_alone(lens: Analyzer) -> Any:
    return {"input_ids": lens.tokenizer(TEXT)["input_ids"]}


def with_boolean_mask(lens: Analyzer) -> Any:
    encoding = dict(lens.tokenizer(TEXT, return_tensors="pt"))
    return encoding | {"attention_mask": encoding["attention_mask"].bool()}


def with_float_mask(lens: Analyzer) -> Any:
    encoding = dict(lens.tokenizer(TEXT, return_tensors="pt"))
    return encoding | {"attention_mask": encoding["attention_mask"].float()}


def with_what_is_no_model_input(lens: Analyzer) -> Any:
    return dict(lens.tokenizer(TEXT, return_special_tokens_mask=True, return_offsets_mapping=True, return_length=True))


@pytest.mark.parametrize(
    "make",
    [
        as_tensors,
        as_lists,
        as_nested_lists,
        as_batch_encoding,
        as_one_dimension,
        as_numpy,
        as_ids_alone,
        with_boolean_mask,
        with_float_mask,
        with_what_is_no_model_input,
    ],
)
def test_encoding_equals_text(make: Any) -> None:
    lens = toy_lens()
    assert_same(lens.analyze(make(lens)), lens.analyze(TEXT), 1e-12)


def test_batch_encoding_keeps_words() -> None:
    lens = toy_lens()
    padded = lens.tokenizer(TEXT, return_tensors="pt", padding="max_length", max_length=20, padding_side="left")
    assert lens.analyze(padded).word_ids == lens.analyze(TEXT).word_ids


def test_without_tokenizer_tokens_are_ids() -> None:
    result = Analyzer(tiny("bert")).analyze({"input_ids": [7, 8, 9]})
    assert result.tokens == ("7", "8", "9")
    assert result.word_ids is None


@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "albert"])
def test_model_with_a_head_is_analysed_as_its_base(family: str, head: str) -> None:
    model = tiny(family, head)
    given = {"input_ids": some_ids(7)}
    assert_same(Analyzer(model).analyze(given), Analyzer(model.base_model).analyze(given), 1e-12)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_padding_changes_nothing(family: str, side: str) -> None:
    lens = Analyzer(tiny(family))
    pad = lens.loaded.limits.pad
    ids = some_ids(9)
    left, right = {"left": (6, 0), "right": (0, 6), "both": (2, 4)}[side]
    padded = {
        "input_ids": torch.nn.functional.pad(ids, (left, right), value=pad),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), (left, right)),
    }
    alone = lens.analyze({"input_ids": ids}, heads=True)
    found = lens.analyze(padded, heads=True)
    assert_same(found, alone)
    assert found.rows == alone.rows


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_holes_drop_rows_and_columns(family: str) -> None:
    """A token masked inside the text is neither row nor column, but the others keep their positions."""
    lens = Analyzer(tiny(family))
    ids = some_ids(10)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 0, 1, 1, 1])
    kept = mask.nonzero().flatten().tolist()
    result = lens.analyze({"input_ids": ids, "attention_mask": mask}, heads=True)
    assert [label.position for label in result.rows] == kept
    assert result.tokens == tuple(str(int(ids[n])) for n in kept)
    for scope in result.scopes:
        assert result[scope].shape == (lens.depth, 7, 7)
        assert float(result.completeness[scope].max()) < 1e-9
    torch.testing.assert_close(result["weights"].sum(-1), torch.ones(lens.depth, 7, dtype=torch.float64))
    changed = ids.clone()
    changed[[2, 5, 6]] = 11  # what stands in a hole has no influence
    assert_same(lens.analyze({"input_ids": changed, "attention_mask": mask}, heads=True), result)


def test_holes_and_padding_together() -> None:
    lens = toy_lens()
    ids = some_ids(6, high=20)
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    inner = lens.analyze({"input_ids": ids, "attention_mask": mask})
    padded = {
        "input_ids": torch.nn.functional.pad(ids, (3, 2)),
        "attention_mask": torch.nn.functional.pad(mask, (3, 2)),
    }
    assert_same(lens.analyze(padded), inner)
    assert_same(
        lens.analyze(padded, rows=[0, -1]), lens.analyze({"input_ids": ids, "attention_mask": mask}, rows=[0, 3])
    )
    vectors = lens.analyze(padded).vectors("layer", 1)
    assert_close(vectors.norm(dim=-1), inner["layer"][1])


@pytest.mark.parametrize("rows", [[-1], [0], [2, 5], [5, 2], [3, 3], 4, range(3)])
@pytest.mark.parametrize("family", ["bert", "mpnet", "albert"])
def test_rows_are_slices(family: str, rows: Any) -> None:
    lens = Analyzer(tiny(family))
    given = {"input_ids": some_ids(8)}
    full = lens.analyze(given, heads=True)
    part = lens.analyze(given, heads=True, rows=rows)
    places = [n % 8 for n in ([rows] if isinstance(rows, int) else rows)]
    assert part.rows == tuple(full.rows[n] for n in places)
    assert part.columns == full.columns
    for scope in full.scopes:
        assert_close(part[scope], full[scope][:, places])
        torch.testing.assert_close(part.mixing_ratio(scope), full.mixing_ratio(scope)[:, places])
        torch.testing.assert_close(part.remainder(scope), full.remainder(scope)[:, places])
    for scope in full.heads:
        assert_close(part.heads[scope], full.heads[scope][:, :, places])


@pytest.mark.parametrize("layers", [[0], [2], [0, 2], [2, 0, 2], -1, [-3, 1]])
@pytest.mark.parametrize("family", ["bert", "albert"])
def test_layers_are_slices(family: str, layers: Any) -> None:
    lens = Analyzer(tiny(family, num_hidden_layers=3))
    given = {"input_ids": some_ids(6)}
    full = lens.analyze(given)
    part = lens.analyze(given, layers=layers)
    expected = sorted({n % 3 for n in ([layers] if isinstance(layers, int) else layers)})
    assert part.layers == tuple(expected)
    for scope in full.scopes:
        assert_close(part[scope], full[scope][expected], 1e-12)


@pytest.mark.parametrize("scope", SCOPES)
def test_one_scope_equals_that_of_all(scope: str) -> None:
    lens = toy_lens()
    full, part = lens.analyze(TEXT), lens.analyze(TEXT, scopes=scope)
    assert part.scopes == (scope,)
    assert_close(part[scope], full[scope], 1e-12)
    torch.testing.assert_close(part.mixing_ratio(scope), full.mixing_ratio(scope))
    torch.testing.assert_close(part.completeness[scope], full.completeness[scope], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scopes", "names"),
    [
        (["layer", "weights"], ("ATTN-W", "ATTNRESLNFFRESLN-N")),
        (["attnres-n", "ATTN-N", "ATTN-N"], ("ATTN-N", "ATTNRES-N")),
        (" Attention-Block ", ("ATTNRESLN-N",)),
        ({"FF", "ff-Residual"}, ("ATTNRESLNFF-N", "ATTNRESLNFFRES-N")),
    ],
)
def test_scopes_come_in_the_layers_order(scopes: Any, names: tuple[str, ...]) -> None:
    assert toy_lens().analyze(TEXT, scopes=scopes).scopes == names


@pytest.mark.parametrize("chosen", [[1, 3], [3, 1], [0], 2, [-1], range(2)])
def test_heads_are_slices(chosen: Any) -> None:
    lens = toy_lens()
    full, part = lens.analyze(TEXT, heads=True), lens.analyze(TEXT, heads=chosen)
    places = [n % 4 for n in ([chosen] if isinstance(chosen, int) else chosen)]
    assert full.head_indices == (0, 1, 2, 3)
    assert part.head_indices == tuple(places)
    assert list(part.heads) == ["ATTN-W", "ATTN-N"]
    for scope in full.heads:
        assert full.heads[scope].shape == (2, 4, 11, 11)
        assert_close(part.heads[scope], full.heads[scope][:, places], 1e-12)
    assert full.value_norms is not None
    assert part.value_norms is not None
    torch.testing.assert_close(part.value_norms, full.value_norms[:, places])
    torch.testing.assert_close(full.heads["ATTN-W"].mean(1), full["ATTN-W"])


@pytest.mark.parametrize("name", ["attention", "Attention", "attn-n", "ATTN-N"])
def test_heads_by_alias(name: str) -> None:
    result = toy_lens().analyze(TEXT, heads=True)
    assert result.heads[name] is dict(result.heads)["ATTN-N"]


def test_no_heads_unless_asked_for() -> None:
    result = toy_lens().analyze(TEXT)
    assert not result.heads
    assert result.value_norms is None
    with pytest.raises(NormscopeError, match="heads=True"):
        result.heads["attention"]
    with pytest.raises(NormscopeError, match="ATTN-W, ATTN-N"):
        toy_lens().analyze(TEXT, heads=True).heads["layer"]


def test_truncation() -> None:
    lens = toy_lens()
    long = "the cat " * 40
    result = lens.analyze(long, truncation=True)
    assert len(result.tokens) == 40
    assert result.tokens[-1] == "[SEP]"
    encoding = {"input_ids": some_ids(60)}
    assert_same(lens.analyze(encoding, truncation=True), lens.analyze({"input_ids": some_ids(60)[:40]}), 1e-12)
    assert len(lens.analyze(words=["cat"] * 60, truncation=True).tokens) == 40


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_the_longest_input_fits(family: str) -> None:
    lens = Analyzer(tiny(family))
    longest = lens.loaded.limits.positions
    assert longest == (38 if family in {"roberta", "xlm-roberta", "camembert", "mpnet"} else 40)
    result = lens.analyze({"input_ids": some_ids(longest)}, scopes="layer", rows=[-1])
    assert result["layer"].shape == (lens.depth, 1, longest)


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_one_token(family: str) -> None:
    result = Analyzer(tiny(family)).analyze({"input_ids": [7]}, heads=True)
    assert bool((result["weights"] == 1).all())
    assert float(result.mixing_ratio("layer").abs().max()) == 0


def test_position_ids_are_used() -> None:
    lens = toy_lens()
    ids = some_ids(5)
    same = lens.analyze({"input_ids": ids, "position_ids": torch.arange(5)})
    assert_same(same, lens.analyze({"input_ids": ids}), 1e-12)
    shifted = lens.analyze({"input_ids": ids, "position_ids": torch.arange(5) + 3})
    assert not torch.allclose(shifted["layer"], same["layer"])


def test_decoder_attends_to_the_left_only() -> None:
    lens = Analyzer(tiny("bert", is_decoder=True))
    ids = some_ids(6)
    result = lens.analyze({"input_ids": ids})
    assert all(float(result[scope].triu(1).abs().max()) == 0 for scope in SCOPES)
    padded = {"input_ids": torch.nn.functional.pad(ids, (3, 0)), "attention_mask": torch.tensor([0] * 3 + [1] * 6)}
    assert_same(lens.analyze(padded), result)


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_indices_as_arrays(array: Any) -> None:
    """Indices often come out of an argsort: arrays of integers, and their elements, are accepted like ints."""
    lens = toy_lens()
    expected = lens.analyze(TEXT, layers=[1], heads=[2, 0], rows=[3, 1])
    assert_same(lens.analyze(TEXT, layers=array([1]), heads=array([2, 0]), rows=array([3, 1])), expected, 1e-12)
    assert_same(lens.analyze(TEXT, layers=array([1])[0], heads=list(array([2, 0])), rows=[3, 1]), expected, 1e-12)


def test_words_from_a_generator() -> None:
    words = ["the", "cats", "sat"]
    assert_same(toy_lens().analyze(words=(word for word in words)), toy_lens().analyze(words=words), 1e-12)


def test_progress_counts_the_layers() -> None:
    calls: list[tuple[int, int]] = []
    toy_lens().analyze(TEXT, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]


def test_linear_subclass_is_analysed() -> None:
    """The matrix of a linear module that is not exactly nn.Linear is found by applying it."""

    class Other(torch.nn.Linear):
        pass

    model = tiny("bert")
    expected = Analyzer(model).analyze({"input_ids": some_ids(6)})
    for layer in model.encoder.layer:
        for parent, name in ((layer.attention.output, "dense"), (layer.intermediate, "dense"), (layer.output, "dense")):
            plain = getattr(parent, name)
            other = Other(plain.in_features, plain.out_features, dtype=torch.float64).eval()
            other.load_state_dict(plain.state_dict())
            setattr(parent, name, other)
    assert_same(Analyzer(model).analyze({"input_ids": some_ids(6)}), expected)
