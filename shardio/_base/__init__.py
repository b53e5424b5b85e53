"""Helpers that every package uses and that import none: closing, statistics, phase timers."""
