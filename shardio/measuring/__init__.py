"""Measurements of a dataset on this machine: how fast it loads, and what limits the speed.

`stored` measures a dataset that was just converted; `machine` finds the limits of the machine.
"""

from __future__ import annotations

from shardio.measuring.machine import MachineLimits, machine_limits
from shardio.measuring.measure import Conclusion, LoadingReport, LoadingRun, measure_loading
from shardio.measuring.stored import StoredReport, measure_stored, source_bytes

__all__ = [
    "Conclusion",
    "LoadingReport",
    "LoadingRun",
    "MachineLimits",
    "StoredReport",
    "machine_limits",
    "measure_loading",
    "measure_stored",
    "source_bytes",
]
