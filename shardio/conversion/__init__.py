"""Convert files, samples or data frames into a dataset; `convert` is the entry point.

Converters (`Source`) only read. Everything that is written, discarded or reported is decided here,
once for all kinds of input. README.md lists the modules.
"""

from shardio.conversion.api import convert
from shardio.conversion.report import ConversionReport, InputReport, Progress
from shardio.conversion.source import Input, Outcome, Source

__all__ = [
    "ConversionReport",
    "Input",
    "InputReport",
    "Outcome",
    "Progress",
    "Source",
    "convert",
]
