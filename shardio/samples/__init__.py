"""The contents of a sample: clips of videos, images and audio, windows of tokens."""
