"""Sequences of samples, and the contents of each: clips of videos, images, audio, tokens."""
