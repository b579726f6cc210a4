"""The three papers and two studies of our own, experiment by experiment: what each needs and makes of it, what was
published, and the reports."""
