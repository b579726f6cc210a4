"""Reports: sections of tables, figures, claims and numbers as plain data, and the files that they become."""
