"""What a person sees of an analysis: terminal, figures, files, and the viewer in a page, a notebook and a browser."""
