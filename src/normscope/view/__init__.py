"""What a person sees of an analysis: terminal, matplotlib figures, a self-contained page, and files."""
