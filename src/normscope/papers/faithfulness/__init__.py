"""Faithfulness of token attributions: how much predictions change when the highest-scored tokens are removed."""
