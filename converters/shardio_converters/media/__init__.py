"""Converters of audio, images and videos: they store the files, or pixels in another form."""
