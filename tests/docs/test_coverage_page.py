"""The coverage page is current: its counts follow from its rows, and rows made again are the same."""

from __future__ import annotations

import re

import pytest

from docs.make_coverage import PAGE, TITLES, coverage_of
from tests.helpers.zoo import CANNOT, media_types, model_types

ROWS = {
    cells[0]: cells[1]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4 and cells[0] in model_types()
}


def test_every_type_has_a_row_and_is_counted() -> None:
    assert set(ROWS) == set(model_types())
    counts = {status: list(ROWS.values()).count(status) for status in ("described", "derived", "refused", "not built")}
    assert sum(counts.values()) == len(ROWS)
    assert counts["not built"] == len(CANNOT)
    said = re.search(
        r"\*\*(\d+) of (\d+) model types are taken\*\*, (\d+) described and (\d+) derived", PAGE.read_text()
    )
    assert said is not None
    taken = counts["described"] + counts["derived"]
    assert [int(one) for one in said.groups()] == [
        taken, len(ROWS) - counts["not built"], counts["described"], counts["derived"],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", TITLES)
def test_images_and_sound_are_counted(kind: str) -> None:
    part = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = [one for one in part if one.startswith(TITLES[kind])]
    rows = dict(re.findall(r"^\| (\S+) \| (described|derived|refused|not built) \|", text, re.MULTILINE))
    assert set(rows) == set(media_types()[kind])
    counts = {status: list(rows.values()).count(status) for status in ("described", "derived", "not built")}
    taken = counts["described"] + counts["derived"]
    assert text.split("\n")[2].startswith(
        f"**{taken} of {len(rows) - counts['not built']}**, {counts['described']} described and {counts['derived']}"
    )


def test_a_described_image_type_made_again() -> None:
    assert coverage_of("vit", media_types()["image"]["vit"]).status == "described"


def test_the_readme_has_the_number() -> None:
    taken = sum(status in ("described", "derived") for status in ROWS.values())
    built = len(ROWS) - len(CANNOT)
    assert f"[{taken} of {built} model types](docs/coverage.md)" in (PAGE.parents[1] / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", sorted(ROWS)[3::24])
def test_rows_made_again(name: str) -> None:
    assert coverage_of(name).status == ROWS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_made_again(name: str) -> None:
    assert coverage_of(name).status == ROWS[name]
