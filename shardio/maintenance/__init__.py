"""Operate on finished shards and datasets: verify, repair, rewrite, extend, count and compare them.

Each public name is imported on first use, so that verifying loads no code that rewrites shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardio.maintenance.added_columns import add_column
    from shardio.maintenance.comparison import DiffReport, diff
    from shardio.maintenance.jobs import MaintenanceProgress
    from shardio.maintenance.repairing import Loss, RepairReport, ShardRepair, repair
    from shardio.maintenance.resharding import MaintenanceReport, compact, merge, reshard
    from shardio.maintenance.salvage import Survey, survey_shard
    from shardio.maintenance.splitting import SplitReport, add_subset, split
    from shardio.maintenance.statistics import StatsReport, compute_stats
    from shardio.maintenance.verify import Finding
    from shardio.maintenance.verify.dataset import VerificationReport, verify_dataset, verify_shard

__all__ = [
    "DiffReport",
    "Finding",
    "Loss",
    "MaintenanceProgress",
    "MaintenanceReport",
    "RepairReport",
    "ShardRepair",
    "SplitReport",
    "StatsReport",
    "Survey",
    "VerificationReport",
    "add_column",
    "add_subset",
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

_NAMES = {
    "added_columns": ("add_column",),
    "comparison": ("DiffReport", "diff"),
    "jobs": ("MaintenanceProgress",),
    "repairing": ("Loss", "RepairReport", "ShardRepair", "repair"),
    "resharding": ("MaintenanceReport", "compact", "merge", "reshard"),
    "salvage": ("Survey", "survey_shard"),
    "splitting": ("SplitReport", "add_subset", "split"),
    "statistics": ("StatsReport", "compute_stats"),
    "verify": ("Finding",),
    "verify.dataset": ("VerificationReport", "verify_dataset", "verify_shard"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
"""The full name of the module that defines each public name."""
_ADVICE = {
    **dict.fromkeys(("check", "validate", "verify"), "verify_dataset"),
    **dict.fromkeys(("concat", "concatenate"), "merge"),
    **dict.fromkeys(("statistics", "stats"), "compute_stats"),
}
"""Names that users try, and the public names."""


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    from importlib import import_module

    if name not in _HOMES:
        from shardio._base.callers import did_you_mean, refuse_name

        known = _ADVICE.get(name)
        hint = f"write {__name__}.{known}" if known else did_you_mean(name, __all__)
        hint = hint or f"it has {', '.join(filter(str.islower, __all__))}"
        refuse_name(__name__, name, f"module {__name__!r} has no attribute {name!r}: {hint}")

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
