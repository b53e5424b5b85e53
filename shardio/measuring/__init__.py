"""Measurements of a dataset on this machine: loading speed, its limit, and what to change.

`stored` measures the result of a conversion.
"""

from __future__ import annotations

from shardio.measuring.conclusion import Conclusion, Figures, Limit, conclude
from shardio.measuring.measure import LoadingReport, LoadingRun, measure_loading
from shardio.measuring.stored import StoredReport, measure_stored, source_bytes

__all__ = [
    "Conclusion",
    "Figures",
    "Limit",
    "LoadingReport",
    "LoadingRun",
    "StoredReport",
    "conclude",
    "measure_loading",
    "measure_stored",
    "source_bytes",
]
