"""Displays of results: terminal, figures, files, and the viewer as a page, a notebook widget and a local server."""
