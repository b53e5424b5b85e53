"""Converters of audio, images and videos: the files as they are, or their pixels."""
