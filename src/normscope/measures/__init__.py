"""Measures: pure functions of maps and contribution vectors."""
