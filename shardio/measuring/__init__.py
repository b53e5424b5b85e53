"""Measurements of a dataset on this machine: how fast it loads, and what limits the speed.

`measure` times a loader, and `conclusion` finds the limit and the options to change. `stored`
measures a dataset that was just converted: how fast samples are read, and how much the pictures
differ from the originals.
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
