"""Maintenance of finished shards and datasets: verify, repair, rewrite, extend, count, compare.

Names are imported on first use, so that a process that only verifies does not import the code that
rewrites shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardio.maintenance.added_columns import add_column
    from shardio.maintenance.comparison import DiffReport, diff
    from shardio.maintenance.repairing import (
        Loss,
        RepairProgress,
        RepairReport,
        ShardRepair,
        repair,
    )
    from shardio.maintenance.resharding import MaintenanceReport, compact, merge, reshard
    from shardio.maintenance.splitting import SplitReport, split
    from shardio.maintenance.statistics import StatsReport, compute_stats
    from shardio.maintenance.verify.dataset import (
        MaintenanceProgress,
        Survey,
        VerificationReport,
        survey_shard,
        verify_dataset,
        verify_shard,
    )
    from shardio.maintenance.verify.findings import Finding
    from shardio.maintenance.verify.runner import VerificationProgress

__all__ = [
    "DiffReport",
    "Finding",
    "Loss",
    "MaintenanceProgress",
    "MaintenanceReport",
    "RepairProgress",
    "RepairReport",
    "ShardRepair",
    "SplitReport",
    "StatsReport",
    "Survey",
    "VerificationProgress",
    "VerificationReport",
    "add_column",
    "compact",
    "compute_stats",
    "diff",
    "merge",
    "repair",
    "reshard",
    "split",
    "survey_shard",
    "verify_dataset",
    "verify_shard",
]

# The module of each public name.
_HOMES = {
    "DiffReport": "shardio.maintenance.comparison",
    "Finding": "shardio.maintenance.verify.findings",
    "Loss": "shardio.maintenance.repairing",
    "MaintenanceProgress": "shardio.maintenance.verify.dataset",
    "MaintenanceReport": "shardio.maintenance.resharding",
    "RepairProgress": "shardio.maintenance.repairing",
    "RepairReport": "shardio.maintenance.repairing",
    "ShardRepair": "shardio.maintenance.repairing",
    "SplitReport": "shardio.maintenance.splitting",
    "StatsReport": "shardio.maintenance.statistics",
    "Survey": "shardio.maintenance.verify.dataset",
    "VerificationProgress": "shardio.maintenance.verify.runner",
    "VerificationReport": "shardio.maintenance.verify.dataset",
    "add_column": "shardio.maintenance.added_columns",
    "compact": "shardio.maintenance.resharding",
    "compute_stats": "shardio.maintenance.statistics",
    "diff": "shardio.maintenance.comparison",
    "merge": "shardio.maintenance.resharding",
    "repair": "shardio.maintenance.repairing",
    "reshard": "shardio.maintenance.resharding",
    "split": "shardio.maintenance.splitting",
    "survey_shard": "shardio.maintenance.verify.dataset",
    "verify_dataset": "shardio.maintenance.verify.dataset",
    "verify_shard": "shardio.maintenance.verify.dataset",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardio.maintenance' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
