"""A request on its way: what was asked for, what it costs, and the results of a batch."""
