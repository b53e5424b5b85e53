"""Converters of audio, images and videos, which store media unchanged, encoded anew, or decoded."""
