"""Side-by-side measurements: `python -m benchmarks`. All figures are ratios of times taken in the same run."""
