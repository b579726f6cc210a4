"""The activation split by Shapley values instead of integrated gradients."""
