"""How fast a dataset loads on this machine, what limits it, and which option to turn.

`stored` measures what a conversion has made, and estimates what one would.
"""

from __future__ import annotations

from shardio.measuring.conclusion import Conclusion, Figures, Limit, conclude
from shardio.measuring.measure import LoadingReport, LoadingRun, measure_loading
from shardio.measuring.stored import (
    Estimate,
    StoredReport,
    estimate,
    measure_stored,
    source_bytes,
)

__all__ = [
    "Conclusion",
    "Estimate",
    "Figures",
    "Limit",
    "LoadingReport",
    "LoadingRun",
    "StoredReport",
    "conclude",
    "estimate",
    "measure_loading",
    "measure_stored",
    "source_bytes",
]
