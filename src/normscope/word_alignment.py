"""Word alignments of one sentence pair, read from the decoder's maps (`EncoderDecoderAnalysis.alignments`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from normscope.arguments import check_indices
from normscope.errors import NormscopeError
from normscope.measures.alignment import Links, alignment_maps_of_words, format_pharaoh, word_links
from normscope.measures.tokens import BEGINS, CONTINUES, number_words

if TYPE_CHECKING:
    from normscope.analysis import Analysis

READ = 2 / 3  # up to this share of the decoder's depth, rows align with the word that they read
# The layer with the lowest error rate over linked words, as a share of the depth, by setting and kind of map. Of 6
# layers, on Hansards English-French: AWI by norms 2 (5.7 %), by weights 3 (21.1 %); AWO 5 (25.6 % and 26.8 %).
DEPTHS = {("AWI", "N"): 1 / 3, ("AWI", "W"): 1 / 2, ("AWO", "N"): 5 / 6, ("AWO", "W"): 5 / 6}


@dataclass(frozen=True, eq=False, repr=False)
class WordAlignment:
    """Links between the source and the target words of a sentence pair. Iterating yields the links in order."""

    links: Links  # (source word, target word), counted from 0
    source: tuple[str, ...]
    target: tuple[str, ...]
    map: Tensor  # (target words, source words and the source's special tokens): what the links were chosen from
    scope: str
    layer: int
    setting: str  # "AWI": rows that read a word; "AWO": rows that write it

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The linked words, (source word, target word), in the order of the target."""
        ordered = sorted(self.links, key=lambda link: (link[1], link[0]))
        return [(self.source[source], self.target[target]) for source, target in ordered]

    @property
    def pharaoh(self) -> str:
        """The links in Pharaoh format: ``0-0 1-2``."""
        return format_pharaoh(self.links)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self.links))

    def __len__(self) -> int:
        return len(self.links)

    def __contains__(self, link: object) -> bool:
        return link in self.links

    def __repr__(self) -> str:
        return f"WordAlignment({self.pharaoh!r}, {self.scope}, layer {self.layer}, {self.setting})"


def align_words(
    decoder: Analysis,
    scope: str | None = None,
    layer: int | None = None,
    setting: str | None = None,
    threshold: float | None = None,
    symmetrise: str | None = None,
    word_ids: Sequence[int | None] | None = None,
) -> WordAlignment:
    """The word alignment in a decoder's analysis. See `EncoderDecoderAnalysis.alignments`."""
    name = _alignment_scope(decoder, scope)
    layer, setting = choose_alignment_layer(int(decoder.info["model_layers"]), name, layer, setting)
    if layer not in decoder.layers:
        raise NormscopeError(
            f"Layer {layer} was not analysed, from which words are aligned: analyse it too, or choose one of "
            f"{', '.join(map(str, decoder.layers))} with layer=."
        )
    own = [n for n, label in enumerate(decoder.columns) if label.side == "decoder"]
    encoder = [n for n, label in enumerate(decoder.columns) if label.side == "encoder"]
    if [label.position for label in decoder.rows] != [decoder.columns[n].position for n in own]:
        raise NormscopeError("Aligning words needs every row of the decoder: analyse the sentence pair without rows=.")
    ids = _alignment_word_ids(decoder, word_ids)
    source, target = ([ids[n] for n in side] for side in (encoder, own))
    for side, words in (("source", source), ("target", target)):
        if all(word is None for word in words):
            raise NormscopeError(f"The {side} has no words that could be aligned, only special tokens.")
    by_word = alignment_maps_of_words(decoder.at(name, layer)[:, encoder].double(), source, target, setting)
    texts = [_alignment_words(decoder, places, ids) for places in (encoder, own)]
    links = word_links(by_word, len(texts[0]), threshold, symmetrise)
    return WordAlignment(links, texts[0], texts[1], by_word, name, layer, setting)


def choose_alignment_layer(depth: int, scope: str, layer: int | None, setting: str | None) -> tuple[int, str]:
    """The layer (from 0) and the setting for a scope of a decoder with `depth` layers, where they were not given.

    Lower layers align with the word that they read (AWI), upper ones with the word that they write (AWO).
    """
    kind = scope[-1]
    if layer is None:
        setting = setting or "AWI"
        if (setting, kind) not in DEPTHS:
            raise NormscopeError(f"The alignment setting must be AWI or AWO, not {setting!r}.")
        return max(round(DEPTHS[setting, kind] * depth) - 1, 0), setting
    (layer,) = check_indices("layer", layer, depth)
    return layer, setting or ("AWI" if layer + 1 <= max(READ * depth, 1) else "AWO")


def _alignment_scope(decoder: Analysis, scope: str | None) -> str:
    """The name of the scope to align from; it must include cross-attention."""
    name = decoder.resolve("XATTN-N" if scope is None else scope)
    if "XATTN" not in name:
        raise NormscopeError(
            f"{name} comes before the decoder reads the source, so it cannot align words. Use XATTN-N or a later scope."
        )
    return name


def _alignment_word_ids(decoder: Analysis, given: Sequence[int | None] | None) -> list[int | None]:
    """The word of each column, numbered from 0 on each side."""
    ids = decoder.word_ids if given is None else tuple(given)
    if ids is None:
        raise NormscopeError(
            "The words of this sentence pair are unknown: analyse texts with a tokenizer, or pass the word of each "
            "column, the decoder's first: alignments(word_ids=[None, 0, 0, 1, ...])."
        )
    if len(ids) != len(decoder.columns):
        raise NormscopeError(
            f"word_ids has {len(ids)} entries for {len(decoder.columns)} columns: give one for each column."
        )
    found: list[int | None] = list(ids)
    for side in ("decoder", "encoder") if given is None else ():
        places = [n for n, label in enumerate(decoder.columns) if label.side == side]
        tokens, words = [decoder.columns[n].token for n in places], [ids[n] for n in places]
        # The tokenizer's words only where tokens do not show where words begin: they differ between the two sides.
        known = None if any(token.startswith(BEGINS) for token in tokens) else words
        for n, word in zip(places, number_words(tokens, [word is None for word in words], known), strict=True):
            found[n] = word
    return found


def _alignment_words(decoder: Analysis, places: Sequence[int], ids: Sequence[int | None]) -> tuple[str, ...]:
    """The words of one side as text, without the marks of subwords."""
    texts: dict[int, str] = {}
    for n in places:
        word = ids[n]
        if word is not None:
            token = decoder.columns[n].token
            texts[word] = texts.get(word, "") + (token.removeprefix(CONTINUES) if word in texts else token)
    cleaned = (texts[word] for word in sorted(texts))
    return tuple(text[1:] if text.startswith(BEGINS) and len(text) > 1 else text for text in cleaned)
