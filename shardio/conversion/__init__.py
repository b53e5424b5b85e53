"""Convert files, samples or data frames into a dataset; `convert` is the entry point.

A `Converter` reads the inputs of one kind and yields their samples. This package decides, for all
kinds, which samples are written or discarded, and what is reported. README.md lists the modules.
"""

from shardio.conversion.api import convert
from shardio.conversion.converter import (
    BUILT_IN,
    Converter,
    Input,
    Outcome,
    converter_class,
    converter_classes,
    known_kinds,
)
from shardio.conversion.report import (
    ConversionReport,
    InputReport,
    Progress,
    StoreChoice,
    StoreEstimate,
    choose_store,
)

__all__ = [
    "BUILT_IN",
    "ConversionReport",
    "Converter",
    "Input",
    "InputReport",
    "Outcome",
    "Progress",
    "StoreChoice",
    "StoreEstimate",
    "choose_store",
    "convert",
    "converter_class",
    "converter_classes",
    "known_kinds",
]
