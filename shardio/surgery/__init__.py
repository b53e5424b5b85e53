"""What is done to finished shards and datasets.

An audit checks every byte of them; a survey reads what a damaged shard still says of itself; a
repair saves what is undamaged. Each name is loaded from its module when it is first used: a process
that audits needs nothing of what rewrites.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardio.surgery.adding import add_column
    from shardio.surgery.audit import AuditReport, audit_dataset, audit_shard
    from shardio.surgery.auditors import AuditProgress
    from shardio.surgery.comparing import DiffReport, diff
    from shardio.surgery.counting import StatsReport, compute_stats
    from shardio.surgery.finding import Finding
    from shardio.surgery.merging import merge
    from shardio.surgery.repairing import Loss, RepairProgress, RepairReport, ShardRepair, repair
    from shardio.surgery.resharding import compact, reshard
    from shardio.surgery.rewriting import SurgeryReport
    from shardio.surgery.soundness import SurgeryProgress
    from shardio.surgery.splitting import SplitReport, split
    from shardio.surgery.survey import Survey, survey_shard

__all__ = [
    "AuditProgress",
    "AuditReport",
    "DiffReport",
    "Finding",
    "Loss",
    "RepairProgress",
    "RepairReport",
    "ShardRepair",
    "SplitReport",
    "StatsReport",
    "SurgeryProgress",
    "SurgeryReport",
    "Survey",
    "add_column",
    "audit_dataset",
    "audit_shard",
    "compact",
    "compute_stats",
    "diff",
    "merge",
    "repair",
    "reshard",
    "split",
    "survey_shard",
]

# Where each name lives.
_HOMES = {
    "AuditProgress": "shardio.surgery.auditors",
    "AuditReport": "shardio.surgery.audit",
    "DiffReport": "shardio.surgery.comparing",
    "Finding": "shardio.surgery.finding",
    "Loss": "shardio.surgery.repairing",
    "RepairProgress": "shardio.surgery.repairing",
    "RepairReport": "shardio.surgery.repairing",
    "ShardRepair": "shardio.surgery.repairing",
    "SplitReport": "shardio.surgery.splitting",
    "StatsReport": "shardio.surgery.counting",
    "SurgeryProgress": "shardio.surgery.soundness",
    "SurgeryReport": "shardio.surgery.rewriting",
    "Survey": "shardio.surgery.survey",
    "add_column": "shardio.surgery.adding",
    "audit_dataset": "shardio.surgery.audit",
    "audit_shard": "shardio.surgery.audit",
    "compact": "shardio.surgery.resharding",
    "compute_stats": "shardio.surgery.counting",
    "diff": "shardio.surgery.comparing",
    "merge": "shardio.surgery.merging",
    "repair": "shardio.surgery.repairing",
    "reshard": "shardio.surgery.resharding",
    "split": "shardio.surgery.splitting",
    "survey_shard": "shardio.surgery.survey",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module, once (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardio.surgery' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
