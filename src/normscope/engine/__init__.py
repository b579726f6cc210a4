"""From a request to results: checking it, estimating its cost, running a batch, assembling results."""
