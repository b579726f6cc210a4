"""`result.alignments()` against brute force over the contribution vectors, in float64."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from normscope import Analysis, EncoderDecoderAnalysis, NormscopeError
from normscope.word_alignment import choose_alignment_layer
from tests.helpers.toys import SOURCE, TARGET, toy_analysis, toy_translation, translator

Links = set[tuple[int, int]]


def translation(name: str = "bart", **options: Any) -> EncoderDecoderAnalysis:
    found: EncoderDecoderAnalysis = translator(name).analyze(SOURCE, text_target=TARGET, **options)
    return found


def by_hand(result: EncoderDecoderAnalysis, scope: str, layer: int, written: bool, ids: list[Any]) -> list[list[float]]:
    """The map between words: for each target word a list of the source words' cells, then the special tokens'."""
    decoder = result.side("decoder")
    norms = decoder.vectors(scope, layer).double().norm(dim=-1).tolist()
    own = [n for n, label in enumerate(decoder.columns) if label.side == "decoder"]
    others = [n for n, label in enumerate(decoder.columns) if label.side == "encoder"]
    sources = sorted({ids[n] for n in others} - {None})
    table = []
    for word in sorted({ids[n] for n in own} - {None}):
        rows = [norms[row - 1 if written else row] for row, n in enumerate(own) if ids[n] == word]
        cells = [[sum(row[n] for n in others if ids[n] == source) for row in rows] for source in sources]
        cells += [[row[n] for row in rows] for n in others if ids[n] is None]
        table.append([sum(cell) / len(rows) for cell in cells])
    return table


def links_by_hand(table: list[list[float]], sources: int, threshold: float | None, symmetrise: str | None) -> Links:
    shares = [[cell / sum(row) for cell in row] for row in table]
    best = {(row.index(max(row)), n) for n, row in enumerate(shares) if row.index(max(row)) < sources}
    back = {(s, max(range(len(shares)), key=lambda t: shares[t][s])) for s in range(sources)}
    enough = {(s, t) for t, row in enumerate(shares) for s in range(sources) if row[s] >= (threshold or 0)}
    if symmetrise is None:
        return best if threshold is None else enough
    return enough & (best & back if symmetrise == "intersection" else best | back)


@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("symmetrise", [None, "intersection", "union"])
def test_links_by_brute_force(name: str, threshold: float | None, symmetrise: str | None) -> None:
    """Subwords included: the second and third target tokens are one word, and so are the first two source tokens."""
    result = translation(name)
    decoder = result.side("decoder")
    ids = [None, 0, 1, 1, 2, 3, 0, 0, 1, None]
    assert len(ids) == len(decoder.columns)
    for scope in decoder.scopes:
        if "XATTN" not in scope or scope.endswith("-W"):
            continue
        for layer in decoder.layers:
            for setting in ("AWI", "AWO"):
                found = result.alignments(
                    scope, layer, setting=setting, threshold=threshold, symmetrise=symmetrise, word_ids=ids
                )
                table = by_hand(result, scope, layer, setting == "AWO", ids)
                torch.testing.assert_close(found.map, torch.tensor(table, dtype=torch.float64))
                assert set(found) == links_by_hand(table, 2, threshold, symmetrise)
                assert (found.scope, found.layer, found.setting) == (scope, layer, setting)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    lens = translator()
    source, target = (lens.tokenizer(text)["input_ids"] for text in (SOURCE, TARGET))
    target = [1, *target[:-1]]

    def padded(ids: list[int]) -> tuple[list[int], list[int]]:
        pads, ones = [0] * 3, [1] * len(ids)
        return (pads + ids, pads + ones) if side == "left" else (ids + pads, ones + pads)

    given = dict(zip(("input_ids", "attention_mask"), padded(source), strict=True))
    given |= dict(zip(("decoder_input_ids", "decoder_attention_mask"), padded(target), strict=True))
    found, expected = lens.analyze(given), translation()
    assert isinstance(found, EncoderDecoderAnalysis)
    assert found.alignments().links == expected.alignments().links
    torch.testing.assert_close(found.alignments().map, expected.alignments().map)


def test_words_and_pharaoh() -> None:
    found = translation().alignments(threshold=0.01)
    assert (found.source, found.target) == (tuple(SOURCE.split()), tuple(TARGET.split()))
    assert found.pharaoh == " ".join(f"{source}-{target}" for source, target in sorted(found.links))
    assert found.pairs == [(found.source[s], found.target[t]) for s, t in sorted(found, key=lambda link: link[::-1])]
    assert (len(found), next(iter(found)) in found, (9, 9) in found) == (len(found.links), True, False)
    assert found.pharaoh in repr(found)


def test_weights_are_rows_of_shares() -> None:
    """The cells of -W scopes are weights; both directions of the default choice of a row."""
    result = translation()
    weights = result.cross("XATTN-W").double()
    found = result.alignments("XATTN-W", 0)
    assert found.setting == "AWI"
    torch.testing.assert_close(found.map, weights[0, 1:])
    torch.testing.assert_close(result.alignments("XATTN-W", -1).map, weights[-1, :-1])


def test_a_generated_target_and_a_saved_result(tmp_path: Any) -> None:
    result = translator().analyze(SOURCE, generate=6)
    assert isinstance(result, EncoderDecoderAnalysis)
    found = result.alignments()
    assert found.target == result.side("decoder").tokens[1:]
    assert EncoderDecoderAnalysis.load(result.save(tmp_path / "x.safetensors")).alignments().links == found.links
    assert pickle.loads(pickle.dumps(result)).alignments().links == found.links


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(6, [(1, "AWI"), (1, "AWI"), (4, "AWO")]), (12, [(3, "AWI"), (3, "AWI"), (9, "AWO")]), (1, [(0, "AWI")] * 2)],
)
def test_the_layer_and_the_row_by_default(depth: int, expected: list[tuple[int, str]]) -> None:
    for setting, layer in zip((None, "AWI", "AWO"), expected, strict=False):
        assert choose_alignment_layer(depth, "XATTN-N", None, setting) == layer


def test_rows_are_read_below_and_written_above() -> None:
    assert [choose_alignment_layer(6, "XATTN-N", n, None)[1] for n in range(6)] == ["AWI"] * 4 + ["AWO"] * 2
    assert choose_alignment_layer(6, "XATTN-N", -1, None) == (5, "AWO")
    assert choose_alignment_layer(6, "XATTN-N", 0, "AWO") == (0, "AWO")
    assert choose_alignment_layer(6, "XATTN-W", None, None) == (2, "AWI")
    assert choose_alignment_layer(1, "XATTN-N", 0, None) == (0, "AWI")


@pytest.mark.parametrize(
    ("analysed", "options", "said"),
    [
        ({"scopes": ["XATTN-W"]}, {}, "No scope 'XATTN-N'"),
        ({"layers": [1]}, {}, "Layer 0 was not analysed"),
        ({"rows": [0, 1]}, {}, "every row"),
        ({"scopes": None}, {"scope": "ATTN-N"}, "before the decoder reads the source"),
        ({}, {"layer": 2}, "no layer 2"),
        ({}, {"layer": True}, "must be an integer"),
        ({}, {"setting": "awi"}, "AWI or AWO"),
        ({}, {"layer": 0, "setting": "read"}, "AWO or AWI"),
        ({}, {"threshold": 0.0}, "above 0"),
        ({}, {"threshold": 1.5}, "above 0"),
        ({}, {"symmetrise": "both"}, "intersection or union"),
        ({}, {"word_ids": [0]}, "1 entries for 10 columns"),
        ({}, {"word_ids": [None] * 10}, "source has no words"),
        ({}, {"word_ids": [None] * 6 + [0, 0, 0, 0]}, "target has no words"),
        ({}, {"word_ids": [None, 0, 2, 2, 2, 2, 0, 0, 0, 0]}, "must have a token"),
        ({"scopes": ["layer"]}, {"scope": "nothing"}, "No scope"),
    ],
)
def test_refused(analysed: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(NormscopeError, match=said):
        translation(**analysed).alignments(**options)


def test_words_that_are_unknown() -> None:
    with pytest.raises(NormscopeError, match=r"words of this sentence pair are unknown.*alignments\(word_ids="):
        toy_translation().alignments()
    encoder = EncoderDecoderAnalysis(encoder=toy_analysis())
    with pytest.raises(NormscopeError, match="decoder was not analysed"):
        encoder.alignments()


def test_sound_has_no_words() -> None:
    result = toy_translation("whisper")
    decoder = result.side("decoder")
    own = len(decoder.rows)
    ids = [None, *range(own - 1), *[None] * (len(decoder.columns) - own)]
    with pytest.raises(NormscopeError, match="source has no words"):
        result.alignments(word_ids=ids)


def test_words_of_both_sides_between_spaces_and_punctuation() -> None:
    """The words of the maps' columns: a word per token here, and the start token none."""
    decoder = translation().side("decoder")
    assert isinstance(decoder, Analysis)
    assert decoder.word_ids == (None, 0, 1, 2, 3, 4, 0, 1, 2, None)
