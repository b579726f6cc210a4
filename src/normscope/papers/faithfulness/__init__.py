"""Which scores of input tokens to trust: every method side by side, by what a prediction loses without its tokens."""
