"""Maps, tables and flows in the terminal, for rich consoles."""
