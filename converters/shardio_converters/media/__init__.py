"""Converters of audio, images and videos, which store the original files or their pixels."""
