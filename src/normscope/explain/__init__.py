"""What an answer rests on: every token that a model writes, explained by its input and by the answer so far."""
