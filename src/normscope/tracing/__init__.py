"""One forward pass, watched: what every layer did, as plain tensors."""
