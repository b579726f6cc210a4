"""Decompose a recorded layer into the contribution of each input token. Tensors in, tensors out."""
