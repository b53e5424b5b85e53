"""Samples one behind the other in files, as other loaders of training data keep them."""
