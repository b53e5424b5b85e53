"""How fast a dataset loads on this machine, what limits it, and which option to turn."""

from __future__ import annotations

from shardio.measuring.conclusion import Conclusion, Figures, Limit, conclude
from shardio.measuring.measure import LoadingReport, LoadingRun, measure_loading

__all__ = [
    "Conclusion",
    "Figures",
    "Limit",
    "LoadingReport",
    "LoadingRun",
    "conclude",
    "measure_loading",
]
