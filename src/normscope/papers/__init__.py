"""The three papers, experiment by experiment: what each needs, what it makes of it, and what was published."""
