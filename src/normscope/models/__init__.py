"""Model families described as data, and models loaded for analysis."""
