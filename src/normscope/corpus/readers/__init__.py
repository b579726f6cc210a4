"""Readers of corpora: one module per format; `formats.read` picks the right one."""
