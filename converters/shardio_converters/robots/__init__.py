"""Converters of robot episodes."""
