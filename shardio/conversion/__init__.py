"""Convert files, samples or data frames into a dataset; `convert` is the entry point.

A `Converter` only reads. This package decides once, for all kinds of input, which files are
written, discarded or reported. README.md lists the modules.
"""

from shardio.conversion.api import convert
from shardio.conversion.converter import (
    BUILT_IN,
    Converter,
    Input,
    Outcome,
    converter_class,
    known_kinds,
)
from shardio.conversion.report import ConversionReport, InputReport, Progress

__all__ = [
    "BUILT_IN",
    "ConversionReport",
    "Converter",
    "Input",
    "InputReport",
    "Outcome",
    "Progress",
    "convert",
    "converter_class",
    "known_kinds",
]
