"""The share of the source by hand."""

import torch

from normscope.measures.source_share import source_share


def test_shares_of_signed_scores() -> None:
    scores = torch.tensor([[1.0, -2.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    assert source_share(scores, [False, False, True, True]).tolist() == [5 / 8, 0, 1]
    assert source_share(scores[None], [True, True, True, True]).tolist() == [[1, 0, 1]]
