"""The alignment matrices of one sentence pair, by weights and by norms (EMNLP 2020, section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from normscope.corpus.entries import Entry
from normscope.corpus.measure_registry import Sample
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.errors import NormscopeError
from normscope.inputs.encode import encode
from normscope.measures.alignment import SETTINGS, alignment_maps_of_words
from normscope.papers.emnlp2020.alignment_rates import METHODS
from normscope.papers.emnlp2020.measures import aligned_word_ids, cross_attention_maps
from normscope.papers.study import Setting
from normscope.reports import map_charts
from normscope.reports.report import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST, MOST = 6, 16  # preferred number of words on each side of the sentence pair in the figure
GOLD = "#d55e00"


def alignment_examples(setting: Setting, best: Mapping[tuple[str, str], int]) -> Iterator[Picture]:
    """The alignment matrices of one sentence pair, by weights and by norms, at the best layer by norms."""
    for entry in _example_pairs(setting):
        try:
            source, target, maps = _word_matrices(setting, entry, best)
        except NormscopeError:  # its tokens cannot be assigned to words; try another pair
            continue
        for way in SETTINGS:
            panels = {f"{method}, layer {best[way, 'norm'] + 1}": maps[way, method] for method in METHODS}
            axes = {"rows": target, "columns": source}
            figure = map_charts.heat_map_charts(panels, **axes, xlabel="source", ylabel="target", shared=False)  # type: ignore[arg-type]
            _frame_gold_links(figure, len(panels), entry)
            yield Picture(
                f"alignment-{way.lower()}",
                f"Alignment of one sentence pair, {way}",
                figure,
                f"{entry.id}. Frames: gold links, dashed if only possible. The layer is the one with the lowest AER by "
                "norms over the corpus.",
            )
        return


def _example_pairs(setting: Setting) -> list[Entry]:
    """The entry whose id is the example; otherwise entries with links, those of preferred length first."""
    linked = [entry for entry in setting.entries if entry.possible]
    asked = [entry for entry in linked if entry.id == setting.example]

    def is_long(entry: Entry) -> bool:
        return not all(FEWEST <= len(side or ()) <= MOST for side in (entry.words, entry.target))

    return asked or sorted(linked, key=is_long)[:20]


def _word_matrices(
    setting: Setting, entry: Entry, best: Mapping[tuple[str, str], int]
) -> tuple[list[str], list[str], dict[tuple[str, str], NDArray[np.float64]]]:
    """Source labels, target labels, and the word-level matrix for each setting and method."""
    lens = setting.lens
    (item,) = encode(lens.loaded, (" ".join(entry.words or ()), " ".join(entry.target or ())))
    (result,) = run_batch(
        lens.loaded,
        [item],
        requests_for(lens.loaded, Options(scopes=("XATTN-W", "XATTN-N"), heads=[0])),
        lens.workspace,
    )
    assert isinstance(result, EncoderDecoderAnalysis)
    decoder = result.side("decoder")
    words = aligned_word_ids(Sample(entry, item, item, lens, decoder, result))
    special = [item.sides["encoder"].names[n] for n, word in enumerate(words[0]) if word is None]
    maps = {
        (way, method): alignment_maps_of_words(found[best[way, "norm"], 0], *words, way).double().numpy()
        for way in SETTINGS
        for method, found in cross_attention_maps(decoder).items()
    }
    return [*(entry.words or ()), *special], list(entry.target or ()), maps


def _frame_gold_links(figure: Figure, panels: int, entry: Entry) -> None:
    """Draw a frame around each gold link."""
    from matplotlib.patches import Rectangle

    for axes in figure.axes[:panels]:
        for source, target in sorted(entry.possible):
            line = "-" if (source, target) in entry.sure else (0, (1.5, 1))
            corner = (source - 0.44, target - 0.44)
            axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=GOLD, linewidth=1.0, linestyle=line))
