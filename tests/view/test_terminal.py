"""The terminal views: everything literal, every width, with and without colour."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console, RenderableType

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.labels import shorten_label, visible_label_text
from normscope.view.scales import BEYOND, CIVIDIS, colour_scale, map_values, own_token_cells, worst_completeness
from normscope.view.terminal.cells import STRONGEST
from normscope.view.terminal.maps import strongest_in_terminal_map, terminal_map
from normscope.view.terminal.tables import (
    is_causal,
    terminal_first_token_table,
    terminal_layer_tables,
    terminal_mixing_table,
    terminal_summary_table,
)
from tests.helpers.fakes import NASTY, SENTENCE, fake
from tests.helpers.toys import SCOPES

LONG = [f"t{k}" for k in range(70)]


def shown(view: RenderableType, width: int = 100, colours: str | None = None, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = Console(
        file=file, width=width, color_system=colours, force_terminal=colours is not None, _environ={}, highlight=False
    )
    console.print(view)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def everything(analysis: Analysis, **options: object) -> str:
    views = (terminal_summary_table(analysis), terminal_map(analysis), terminal_mixing_table(analysis))
    return "\n".join(shown(view, **options) for view in views)


def test_a_map_that_fits_shows_its_values() -> None:
    analysis = fake()
    text = shown(terminal_map(analysis, "attention", 2))
    lines = text.splitlines()
    assert lines[0] == "ATTN-N, layer 3 (counted from 1): norm of the contribution"
    for i, token in enumerate(SENTENCE):
        label, *cells = lines[2 + i].split()
        assert label == token
        assert cells == [f"{value:.2f}" for value in analysis["ATTN-N"][2, i].tolist()]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("colours", [None, "standard", "256", "truecolor"])
@pytest.mark.parametrize("tokens", [SENTENCE, NASTY, ("one",), LONG], ids=["sentence", "nasty", "one", "long"])
def test_no_line_is_wider_than_the_terminal(tokens: tuple[str, ...], colours: str | None, width: int) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown(terminal_map(fake(tokens)), width, colours))
    assert max(map(cell_len, text.splitlines())) <= width


def test_rows_of_a_map_line_up() -> None:
    text = shown(terminal_map(fake(NASTY), "ATTN-N"), 200)
    starts = {cell_len(re.split(r"\d\.\d\d", line)[0]) for line in text.splitlines() if re.search(r"\d\.\d\d", line)}
    assert len(starts) == 1


def test_tokens_appear_literally() -> None:
    text = everything(fake(("[CLS]", "[bold]x[/bold]", "[/]", "[red]", ":smile:", "\\[x]")), width=120)
    for token in ("[CLS]", "[bold]x[/bold]", "[/]", "[red]", ":smile:", "\\[x]"):
        assert token in text


def test_nothing_in_a_token_controls_the_terminal() -> None:
    text = everything(fake(NASTY), width=120)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028\ud800]", text)
    for spelled in (r"\t", r"\x00", r"\u202e", r"\u2028", r"\ud800", "␣␣", "∅"):
        assert spelled in text


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("plain", "plain"),
        ("Ġword", "Ġword"),
        ("##ing", "##ing"),
        (" a b ", "␣a b␣"),
        ("", "∅"),
        ("a\nb", r"a\nb"),
        ("\x9b", r"\x9b"),
        ("\U000e0001", r"\U000e0001"),
        ("e\u0301", "e\u0301"),
    ],
)
def test_visible(token: str, expected: str) -> None:
    assert visible_label_text(token) == expected


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("short", 5, "short"),
        ("abcdefghij", 5, "ab…ij"),
        ("abcdefghij", 6, "abc…ij"),
        ("abcdefghij", 1, "…"),
        ("漢字漢字漢字", 6, "漢…字"),
        ("e\u0301" * 6, 5, "e\u0301e\u0301…e\u0301e\u0301"),
    ],
)
def test_shorten_cuts_in_the_middle(text: str, width: int, expected: str) -> None:
    assert shorten_label(text, width) == expected
    assert cell_len(expected) <= width


def test_narrow_maps_write_their_columns_downwards() -> None:
    text = shown(terminal_map(fake(), "ATTN-N"), 40)
    assert "█" in text
    columns = [line[8:30:2].ljust(11) for line in text.splitlines()[2:9]]
    assert "".join(line[5] for line in columns) == "highway"


def test_digits_where_blocks_cannot_be_encoded() -> None:
    text = shown(terminal_map(fake(), "ATTN-N"), 40, encoding="ascii")
    assert "0123456789" in text
    assert "99" in text


def test_colour_is_a_background_of_the_scale() -> None:
    def backgrounds(colours: str, **options: bool) -> set[str]:
        console = Console(width=100, color_system=colours, force_terminal=True, _environ={}, **options)
        styles = [segment.style for segment in console.render(terminal_map(fake(), "layer"))]
        return {style.bgcolor.name for style in styles if style and style.bgcolor}

    assert {CIVIDIS[0], CIVIDIS[-1], BEYOND} <= backgrounds("truecolor")
    assert not backgrounds("standard")
    assert not backgrounds("truecolor", no_color=True)


def test_too_many_tokens_give_the_strongest_cells() -> None:
    analysis = fake(LONG, layers=(0,))
    text = shown(terminal_map(analysis, "ATTN-N"), 80)
    assert "The map of 70 columns needs a terminal 144 characters wide; this one has 80." in text
    values = map_values(analysis, "ATTN-N", 0)
    between = np.where(np.eye(70, dtype=bool), 0, values)
    i, j = np.unravel_index(between.argmax(), between.shape)
    first = text.splitlines()[4].split()
    assert first[:5] == [str(i + 1), f"t{i}", str(j + 1), f"t{j}", f"{between[i, j]:.4g}"]
    assert len(text.splitlines()) == 4 + STRONGEST
    assert "█" in shown(terminal_map(analysis, "ATTN-N"), 144)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-6, 1e-3, 1.0, 50.0, 1e4, 1e30, float("nan"), float("inf")])
def test_every_magnitude(factor: float) -> None:
    analysis = fake()
    measured = {scope: replace(m, map=m.map * factor) for scope, m in analysis.measured.items()}
    for width in (40, 100):
        assert everything(replace(analysis, measured=measured), width=width, colours="truecolor")


def test_small_numbers_state_their_unit() -> None:
    analysis = fake()
    measured = {scope: replace(m, map=m.map * 1e-6) for scope, m in analysis.measured.items()}
    assert "in units of 1e-7" in shown(terminal_map(replace(analysis, measured=measured), "ATTN-N"))


def test_the_diagonal_leaves_the_scale_when_it_drowns_the_rest() -> None:
    own = np.eye(3, dtype=bool)
    values = np.where(own, 10.0, 0.5)
    assert colour_scale([values], own) == (0.5, 10.0)
    assert not colour_scale([np.where(own, 0.9, 0.5)], own).clipped
    assert colour_scale([np.ones((1, 1))], np.ones((1, 1), dtype=bool)) == (1.0, 1.0)
    assert "own tokens reach 8.63, beyond the scale" in shown(terminal_map(fake(NASTY, layers=(0, 3))), 80)


def test_own_cells_follow_rows_and_sides() -> None:
    assert own_token_cells(fake(("a", "b", "c"), rows=[2])).tolist() == [[False, False, True]]
    assert own_token_cells(fake(("a",), source=("x", "y"))).tolist() == [[True, False, False]]


def test_sides_are_told_apart() -> None:
    text = shown(terminal_map(fake(("le", "chat"), source=("the", "cat"))))
    assert "columns: inputs (decoder | encoder tokens)" in text


def test_mixing_table_has_a_row_per_layer() -> None:
    analysis = fake(layers=(2, 5))
    lines = shown(terminal_mixing_table(analysis)).splitlines()
    for line, position, layer in zip(lines[-2:], (0, 1), (3, 6), strict=True):
        means = [100 * float(analysis.mixing_ratio(scope)[position].mean()) for scope in SCOPES]
        assert line.split() == [str(layer), *(f"{mean:.1f}" for mean in means)]


def test_summary() -> None:
    analysis = fake(layers=(0, 1, 2, 5), info={"model": "/home/someone/models/mine", "family": "BERT"})
    worst = replace(analysis.measured["ATTN-N"], completeness=torch.tensor([0.0, 0.0, 3e-5, 0.0]))
    text = shown(terminal_summary_table(replace(analysis, measured=dict(analysis.measured) | {"ATTN-N": worst})))
    assert "mine (BERT)" in text
    assert "/home" not in text
    assert "1-3, 6 (counted from 1)" in text
    assert "worst error 3.0e-05 (ATTN-N, layer 3)" in text
    assert "11: [CLS] colin" in text


def test_nan_is_the_worst_error() -> None:
    analysis = fake(layers=(0, 1))
    broken = replace(analysis.measured["ATTN-N"], completeness=torch.tensor([0.1, float("nan")]))
    _, scope, layer = worst_completeness(replace(analysis, measured=dict(analysis.measured) | {"ATTN-N": broken}))
    assert (scope, layer) == ("ATTN-N", 1)


def test_unknown_scope_or_layer_is_refused_at_once() -> None:
    with pytest.raises(NormscopeError, match="No scope"):
        terminal_map(fake(), "nothing")
    with pytest.raises(NormscopeError, match="Layer 9"):
        terminal_map(fake(), "ATTN-N", 9)


def test_sides_are_named_above_their_columns() -> None:
    analysis = fake(("le", "chat", "dort"), source=("the", "cat"))
    for width, title in ((100, r" +decoder +\|encoder *"), (24, r" +de…er \|e…r *")):
        lines = shown(terminal_map(analysis, "ATTN-N", 0), width).splitlines()
        assert any(re.fullmatch(title, line) for line in lines), lines
    assert "(encoder)" in shown(strongest_in_terminal_map(analysis, "ATTN-N", 0))
    assert "(encoder)" not in shown(strongest_in_terminal_map(fake(), "ATTN-N", 0))


def test_columns_that_give_nothing_are_left_out() -> None:
    analysis = fake(("le", "chat", "dort"), source=("the", "cat"))
    analysis["ATTN-N"][..., 3:] = 0
    text = shown(terminal_map(analysis, "ATTN-N", 0))
    assert "the" not in text.split("rows:")[0].split("contribution")[1]
    assert "|" not in text


def test_the_first_token_of_causal_models() -> None:
    causal = fake(("<s>", "a", "b"), side="decoder")
    assert is_causal(causal)
    assert not is_causal(fake())
    assert not is_causal(fake(("le",), source=("the",)))
    assert "First token" not in shown(terminal_layer_tables(fake()))
    text = shown(terminal_layer_tables(causal), 160)
    (titles,) = (line for line in text.splitlines() if "First token" in line)
    assert titles.startswith("Mixing ratio")
    assert "First token <s>: its share in the other outputs" in titles
    shares = [100 * float(causal.first_token_share(s)[0, 1:].mean()) for s in ("weights", "attention", "layer")]
    (first,) = (line for line in text.splitlines() if re.match(" +1 ", line))
    assert first.split()[-3:] == [f"{share:.1f}" for share in shares]
    assert max(map(cell_len, shown(terminal_layer_tables(causal), 80).splitlines())) <= 80


def test_the_first_token_alone_has_no_share() -> None:
    assert re.search(
        r"1 +-", shown(terminal_first_token_table(fake(("<s>", "a"), side="decoder", rows=[0], layers=(0,))))
    )
