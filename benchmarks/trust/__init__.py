"""Which map to trust: scores of sources by every method, against what the model does without these sources."""
