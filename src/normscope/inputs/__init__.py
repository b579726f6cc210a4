"""Conversion of texts, encodings, images and audio features to model inputs."""
