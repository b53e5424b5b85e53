"""Loaders in the race: these modules run in the interpreters of all peers, with NumPy alone."""
