"""The version of this package; the version of the file format is in `format.layout`."""

__version__ = "0.1.0.dev0"
