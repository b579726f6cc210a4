"""Imports every module of the papers and studies that registers corpus measures."""

from normscope.papers.across_layers import measures as across_layers
from normscope.papers.emnlp2020 import measures as emnlp2020
from normscope.papers.emnlp2021 import measures as emnlp2021
from normscope.papers.faithfulness import measures as faithfulness
from normscope.papers.feed_forward import measures as feed_forward
from normscope.papers.shapley import measures as shapley

__all__ = ["across_layers", "emnlp2020", "emnlp2021", "faithfulness", "feed_forward", "shapley"]
