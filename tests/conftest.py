"""What every test starts with."""

import pytest
import torch


@pytest.fixture(autouse=True)
def the_same_numbers_every_time() -> None:
    """A test that draws numbers of its own draws the same ones in every run, whatever ran before it."""
    torch.manual_seed(0)
