"""`normscope serve`: the viewer in a browser on the same machine, and the API that it uses."""
