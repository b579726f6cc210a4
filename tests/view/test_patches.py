"""A vision model's outputs on the grid of patches."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from normscope.errors import NormscopeError
from normscope.view.export import export
from normscope.view.figure.patches import VEIL
from normscope.view.images import image_patch_values
from normscope.view.terminal.maps import terminal_map
from tests.helpers.fakes import fake, fake_picture

PIXELS = np.arange(20 * 40 * 3, dtype=np.uint8).reshape(20, 40, 3)


def drawn(made: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.asarray(made.axes[0].images[-1].get_array())
    return array


def test_cls_of_the_last_scope_and_layer() -> None:
    analysis = fake_picture()
    made = analysis.plot().figure
    assert made.axes[0].get_title() == "ATTNRESLNFFRESLN-N, layer 2, output [CLS]"
    assert np.allclose(drawn(made), analysis["layer"][1, 0, 1:].reshape(2, 3))
    own = float(analysis["layer"][1, 0, 0])
    assert f"Not on the grid: [CLS] {own:.3g}." in made.get_supxlabel().replace("\n", " ")
    assert not made.axes[0].patches


@pytest.mark.parametrize("token", ["2,1", "2, 1", 4, -3])
def test_another_output(token: str | int) -> None:
    analysis = fake_picture()
    made = analysis.plot("ATTN-N", 0, token=token).figure
    assert made.axes[0].get_title() == "ATTN-N, layer 1, output 2,1"
    assert np.allclose(drawn(made), analysis["ATTN-N"][0, 4, 1:].reshape(2, 3))
    (frame,) = made.axes[0].patches
    assert frame.get_xy() == (-0.5, 0.5)


def test_own_patch_beyond_the_scale_is_mentioned() -> None:
    made = fake_picture().plot("layer", 0, token="1,2").figure
    assert "Its own patch (framed): " in made.get_supxlabel().replace("\n", " ")


def test_rows_without_cls() -> None:
    assert fake_picture(rows=[5]).plot("ATTN-N", 0).get_title().endswith("output 2,2")


@pytest.mark.parametrize("token", ["3,1", "x", 7, -8, 1.0, True])
def test_missing_outputs_are_refused(token: Any) -> None:
    with pytest.raises(NormscopeError, match=r"There is no output .* '2,3', or an index from 0 to 6"):
        fake_picture().plot("ATTN-N", 0, token=token)


def test_over_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "x.png"
    image.fromarray(PIXELS).save(path)
    for given in (
        path,
        str(path),
        image.open(path),
        PIXELS,
        PIXELS / 255,
        torch.tensor(PIXELS),
        PIXELS - 300.0,
        PIXELS[..., 0],
    ):
        made = fake_picture().plot(image=given).figure
        under, over = made.axes[0].images
        assert under.get_array().shape == (20, 40)
        assert over.get_alpha() == VEIL
        assert made.axes[0].get_aspect() == pytest.approx((20 / 2) / (40 / 3))  # the picture keeps its shape
    for suffix in ("png", "svg", "pdf"):
        assert export(fake_picture(), tmp_path / f"map.{suffix}", image=path).stat().st_size


@pytest.mark.parametrize(
    "given", ["missing.png", __file__, 5, [[["a"]]], np.zeros((3, 4, 5)), np.zeros(3), {}], ids=str
)
def test_plot_refuses_non_images(given: Any) -> None:
    with pytest.raises(NormscopeError, match=r"(?i)image|picture"):
        fake_picture().plot(image=given)


def test_unknown_choices_and_other_analyses_are_refused() -> None:
    for choice in (("nothing", 0), ("ATTN-N", 5)):
        with pytest.raises(NormscopeError):
            fake_picture().plot(*choice)
    with pytest.raises(NormscopeError, match="no patch grid"):
        image_patch_values(fake(), "ATTN-N", 0, 0)


def test_the_style_stays_inside() -> None:
    import matplotlib

    before = matplotlib.rcParams["axes.titlesize"]
    fake_picture().plot()
    assert matplotlib.rcParams["axes.titlesize"] == before


def shown(view: Any, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, _environ={}, highlight=False).print(view)
    return file.getvalue()


def test_patches_in_the_terminal() -> None:
    lines = shown(terminal_map(fake_picture(), "ATTN-W", 1)).splitlines()
    assert lines[0] == "ATTN-W, layer 2, output [CLS] (counted from 1): attention weight"
    assert [len(line) for line in lines[1:3]] == [7, 7]
    assert lines[-1].startswith("each cell is a patch of the picture; not on the grid: [CLS] ")
    assert "Strong" in shown(terminal_map(fake_picture(), "ATTN-W", 1), width=6)
