"""Datasets and their views as sequences of samples: rows, clips of videos, windows of tokens."""
