"""What is done to finished shards and datasets.

An audit checks every byte of them; a survey reads what a damaged shard still says of itself.
"""

from shardio.surgery.audit import AuditReport, audit_dataset, audit_shard
from shardio.surgery.auditors import AuditProgress
from shardio.surgery.finding import Finding
from shardio.surgery.survey import Survey, survey_shard

__all__ = [
    "AuditProgress",
    "AuditReport",
    "Finding",
    "Survey",
    "audit_dataset",
    "audit_shard",
    "survey_shard",
]
