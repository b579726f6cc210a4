"""Side-by-side measurements: `python -m benchmarks`. Figures are ratios of times taken in the same run, GB, ms or s."""
