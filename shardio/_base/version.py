"""The version of this package; the format has its own, in `format.layout`."""

__version__ = "0.1.0.dev0"
