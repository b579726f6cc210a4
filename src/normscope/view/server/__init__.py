"""`normscope serve`: the viewer in a local browser, and its API."""
