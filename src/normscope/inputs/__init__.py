"""What people give, as items that a model can read."""
