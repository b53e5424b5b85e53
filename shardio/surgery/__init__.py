"""What is done to finished shards and datasets.

An audit checks every byte of them; a survey reads what a damaged shard still says of itself; a
repair saves what is undamaged.
"""

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
