"""One forward pass of a model, recorded layer by layer."""
