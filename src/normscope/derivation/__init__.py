"""Describe an unknown model by watching it: match the tensors of one short pass, then prove the description."""
