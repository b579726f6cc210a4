"""Across layers: how much of a late vector, or of a logit, comes from each input token."""
