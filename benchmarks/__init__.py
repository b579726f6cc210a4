"""Side-by-side measurements: `python -m benchmarks`. Results are ratios of times in the same run, or GB, ms or s."""
