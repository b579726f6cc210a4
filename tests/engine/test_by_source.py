"""Maps by source: the norm of a source's summed vector, against the vectors of its tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normscope import Analysis, Analyzer, NormscopeError
from normscope.decompose import source_rows
from normscope.engine.request import Options, requests_for
from normscope.engine.run import Workspace, run_batch
from normscope.inputs.encode import encode
from normscope.inputs.item import Item, Sources
from tests.helpers.compare import refused, sides
from tests.helpers.tiny import CONFIGS, IMAGES, inputs, tiny
from tests.helpers.toys import TEXT, speaker, toy_lens, translator

TEXT_FAMILIES = tuple(name for name in CONFIGS if name not in (*IMAGES, "whisper"))
NAMES = ("a", "b", "c")
SPANS = {"cats": (0, 8), "mat": (16, 31)}


@cache
def shared(name: str) -> Analyzer:
    return Analyzer(tiny(name))


def with_sources(item: Item, seed: int = 0) -> Item:
    """The item with every token in one of three sources or the rest, at random."""
    generator = torch.Generator().manual_seed(seed)
    index = {side: torch.randint(-1, 3, (len(of.names),), generator=generator) for side, of in item.sides.items()}
    return replace(item, sources=Sources(NAMES, index))


def items_of(name: str, *lengths: int) -> list[Item]:
    loaded = shared(name).loaded
    return [one for n in lengths for one in encode(loaded, inputs(name, loaded.model, n, max(1, n - 3), seed=n))]


def run(name: str, items: list[Item], **options: Any) -> list[Any]:
    loaded = shared(name).loaded
    return run_batch(loaded, items, requests_for(loaded, Options(**options)), Workspace())


def assert_sums(found: Any, by_token: Any, item: Item, limit: float = 1e-9) -> None:
    """Every map by source against the summed vectors, or weights, of the tokens."""
    assert item.sources is not None
    assert sides(found).keys() == sides(by_token).keys()
    for side, analysis in sides(found).items():
        tokens = sides(by_token)[side]
        columns = item.sources.columns((label.side, label.position) for label in tokens.columns)
        names = [label.token for label in analysis.columns]
        groups = [columns == (NAMES.index(name) if name in NAMES else -1) for name in names]
        assert bool(torch.stack(groups).sum(0).eq(1).all())
        assert analysis.rows == tokens.rows
        for scope in analysis.scopes:
            for n, layer in enumerate(analysis.layers):
                if scope.endswith("-W"):
                    expected = summed(tokens.at(scope, layer)[..., None], groups)[..., 0]
                else:
                    vectors = summed(tokens.vectors(scope, layer), groups)
                    expected = torch.linalg.vector_norm(vectors, dim=-1)
                    assert_near(analysis.vectors(scope, layer), vectors, limit)
                assert_near(analysis.at(scope, layer), expected, limit)
                assert_near(analysis.remainder(scope)[n], tokens.remainder(scope)[tokens.layers.index(layer)], limit)
                if scope in tokens.mixing_scopes:
                    ratios = tokens.mixing_ratio(scope)[tokens.layers.index(layer)]
                    assert_near(analysis.mixing_ratio(scope)[n], ratios, limit)


def summed(vectors: Tensor, groups: list[Tensor]) -> Tensor:
    return torch.stack([vectors[:, group].sum(1) for group in groups], dim=1)


def assert_near(found: Tensor, expected: Tensor, limit: float) -> None:
    assert found.shape == expected.shape
    scale = float(expected.abs().max()) or 1.0
    assert float((found - expected).abs().max()) <= limit * scale


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_norms_of_summed_vectors(name: str) -> None:
    """One input, and the same in a batch with a longer and a shorter one."""
    items = [with_sources(item, n) for n, item in enumerate(items_of(name, 12, 9, 2))]
    alone = run(name, items[1:2])[0]
    assert_sums(alone, run(name, [replace(items[1], sources=None)])[0], items[1])
    for found, item in zip(run(name, items), items, strict=True):
        expected = alone if item is items[1] else run(name, [item])[0]
        for side, analysis in sides(found).items():
            for scope in analysis.scopes:
                assert_near(analysis[scope], sides(expected)[side][scope], 1e-6)  # some families: float32 inside


@pytest.mark.parametrize("name", ["bert", "llama", "bart", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_masked_tokens_are_in_no_source(name: str, side: str) -> None:
    model = shared(name).model
    given = inputs(name, model, 9)
    mask = given["attention_mask"].clone()
    mask[0, {"left": slice(0, 3), "right": slice(6, None), "middle": slice(3, 5)}[side]] = 0
    (plain,) = encode(shared(name).loaded, {**given, "attention_mask": mask})
    item = with_sources(plain)
    assert_sums(run(name, [item])[0], run(name, [plain])[0], item)


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "frozen"},
        {"gate": "tangent"},
        {"value_bias": "remainder"},
        {"rows": [-1, 2]},
        {"layers": [1], "scopes": ["layer", "weights"]},
        {"scopes": ["attention"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_options(name: str, options: dict[str, Any]) -> None:
    (plain,) = items_of(name, 9)
    item = with_sources(plain)
    assert_sums(run(name, [item], **options)[0], run(name, [plain], **options)[0], item)


@pytest.mark.parametrize("name", ["bert", "llama", "mixtral", "marian"])
def test_blocks_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item = with_sources(items_of(name, 13)[0])
    whole = run(name, [item])[0]
    monkeypatch.setattr(source_rows, "BLOCK_BYTES", 1)  # one row at a time
    for side, analysis in sides(run(name, [item])[0]).items():
        for scope in analysis.scopes:
            assert_near(analysis[scope], sides(whole)[side][scope], 1e-12)
            assert torch.allclose(analysis.remainder(scope), sides(whole)[side].remainder(scope), rtol=1e-12)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_blocks_end_where_long_sources_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item = items_of(name, 12)[0]
    index = {side: torch.arange(len(of.names)) // 5 for side, of in item.sides.items()}
    item = replace(item, sources=Sources(NAMES, index))
    blocks: list[Tensor] = []
    split = source_rows._split_rows

    def split_short(rows: Tensor, owners: Tensor, step: int) -> list[Tensor]:
        made = list(split(rows, owners, 4))
        blocks.extend(made)
        return made

    monkeypatch.setattr(source_rows, "_split_rows", split_short)
    assert_sums(run(name, [item])[0], run(name, [replace(item, sources=None)])[0], item)
    assert [one.tolist() for one in blocks[:5]] == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_every_token_as_a_source_gives_the_maps_of_tokens(name: str) -> None:
    given = inputs(name, shared(name).model, 9)
    by_token, found = shared(name).analyze(given), shared(name).analyze(given, sources="token")
    for side, analysis in sides(found).items():
        tokens = sides(by_token)[side]
        assert len(analysis.columns) == len(tokens.columns)
        for scope in analysis.scopes:
            assert_near(analysis[scope], tokens[scope], 1e-9)
            assert float(analysis.completeness[scope].max()) < 1e-6


def test_one_token_and_one_source() -> None:
    lens = toy_lens()
    alone = lens.analyze({"input_ids": [7]}, sources="token")
    assert alone["layer"].shape == (2, 1, 1)
    assert torch.allclose(alone["layer"], lens.analyze({"input_ids": [7]})["layer"], rtol=1e-12)


def test_sources_of_texts_and_chats() -> None:
    texts = toy_lens().analyze("the dog", sources=["the cat sat", "a mat"], template="{0} and {1} was {question}")
    assert [label.token for label in texts.columns] == ["source 1", "source 2", "question", "(rest)"]
    assert len(texts.rows) == 11
    chat = speaker().analyze(chat=[{"role": "user", "content": "the cat"}], sources="message", generate=2)
    assert [label.token for label in chat.columns] == ["user", "(answer)", "(rest)"]
    other = translator().analyze("the cat sat", text_target="le chat", sources={"cat": (4, 7)})
    assert [label.token for label in other.side("encoder").columns] == ["cat", "(rest)"]
    assert [label.token for label in other.side("decoder").columns] == ["cat", "(answer)", "(rest)"]
    assert not other.side("decoder").at("XATTN-N", 0)[:, 1].any()  # cross-attention reads no token of the answer


def test_what_an_analysis_can_do(tmp_path: Path) -> None:
    found = toy_lens().analyze(TEXT, sources=SPANS)
    assert found.by_source
    assert not toy_lens().analyze(TEXT).by_source
    assert "11 x 3 tokens by source" in repr(found)
    table = found.to_pandas()
    assert set(table["input_token"]) == {"cats", "mat", "(rest)"}
    assert set(table["input_side"]) == {"source"}
    loaded = Analysis.load(found.save(tmp_path / "found.safetensors"))
    assert isinstance(loaded, Analysis)
    assert loaded.columns == found.columns
    assert torch.equal(loaded["layer"], found["layer"])
    drawn = found.plot("layer", 1, normalize=True)
    assert [text.get_text() for text in drawn.get_xticklabels()] == ["cats", "mat", "(rest)"]  # type: ignore[union-attr]
    assert "image/png" in found._repr_mimebundle_()[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda found, path: found.words(), r"words\(\) needs a column for each token"),
        (lambda found, path: found.first_token_share("layer"), r"first_token_share\(\) needs"),
        (lambda found, path: found.without_first("layer"), r"without_first\(\) needs"),
        (lambda found, path: found.to_html(path / "a.html"), "The viewer shows maps between tokens"),
    ],
)
def test_what_it_cannot(call: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match=message):
        call(toy_lens().analyze(TEXT, sources=SPANS), tmp_path)


def test_refusals() -> None:
    assert "Leave heads or sources out" in refused(lambda: toy_lens().analyze(TEXT, sources=SPANS, heads=True))
    assert "not the Shapley values of sources" in refused(
        lambda: toy_lens().analyze(TEXT, sources=SPANS, gate="shapley-sampled")
    )
    assert "not the Shapley values of sources" in refused(
        lambda: toy_lens().estimate(TEXT, sources=SPANS, gate="shapley-sampled")
    )
    other = translator().analyze(("the cat sat", "le chat"), sources={"cat": (4, 7)})
    assert "cross() needs a column for each token" in refused(lambda: other.cross("XATTN-N"))


def test_estimates_follow_the_number_of_sources() -> None:
    lens = shared("llama")
    few = lens.estimate({"input_ids": list(range(5, 45))})
    many = Analyzer(tiny("llama"), toy_lens().tokenizer).estimate(" ".join(["the cat"] * 20), sources={"a": (0, 9)})
    assert many.seconds < few.seconds
    assert many.memory < few.memory
