"""The matplotlib style of all figures, in reports and views."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from normscope.errors import NormscopeError

NO_MATPLOTLIB = "Figures need matplotlib: pip install 'normscope[plot]'."
SANS = ("Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans")
# Fallbacks for scripts that the text fonts lack: matplotlib takes a glyph from the first font that has it.
SCRIPTS = (
    *("Noto Sans CJK JP", "Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Malgun Gothic", "Noto Sans Arabic"),
    *("Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Emoji", "Segoe UI Symbol", "Apple Symbols", "DejaVu Sans"),
)
STYLE: dict[str, Any] = {
    "text.usetex": False,
    "text.parse_math": False,  # tokens such as $x^2$ are text
    "svg.fonttype": "none",  # text stays text in vector files
    "svg.hashsalt": "normscope",
    "pdf.fonttype": 42,
    "axes.titlesize": 8,
    "axes.labelsize": 7,
    "axes.linewidth": 0.4,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 2,
    "ytick.major.pad": 2,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 300,
    "image.interpolation": "nearest",
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.03,
}
GREY = "#555555"  # captions and secondary text


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the style of all figures within a `with` block."""
    try:
        import matplotlib
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise NormscopeError(NO_MATPLOTLIB) from error
    installed = set(fontManager.get_font_names())
    text = next((name for name in SANS if name in installed), "DejaVu Sans")
    family = list(dict.fromkeys([text, *(name for name in SCRIPTS if name in installed)]))
    settings: Any = STYLE | {"font.family": family}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Glyphs that no installed font has are drawn as boxes; the text in vector files is still correct.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
