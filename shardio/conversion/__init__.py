"""Sources of any kind become datasets: the Source protocol, how converters are found, the driver.

`source` says what a converter offers, `plan` which inputs there are and how they are cut into
units, `unit` what a worker does with one, `staging` where shards lie until all is done, `appending`
what a dataset that grows has already, and `files` runs the plan and publishes; `driver` holds
`convert`, the way in. A converter only reads; everything
that is written, discarded or reported is decided here, once for all kinds.
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
