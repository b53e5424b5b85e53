"""Check what an optional field says of which samples have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.format.layout import Kind
from shardio.format.schema import Schema
from shardio.maintenance.verify.findings import Findings
from shardio.maintenance.verify.window import Content
from shardio.shard.opening import Sections

Present = dict[str, npt.NDArray[Any]]
"""By optional field: which samples have a value."""


def audit_validity(
    content: Content, schema: Schema, sections: Sections, n_samples: int, findings: Findings
) -> Present:
    """Check that no bit behind the last sample's is set; returns what the others say."""
    present: Present = {}
    for name in schema.optional:
        section = sections[Kind.VALIDITY, schema.field_id(name), 0]
        whole = content.bytes[section.offset : section.offset + section.size]
        stored = np.frombuffer(whole, np.uint8, section.size)
        bits = np.unpackbits(stored, bitorder="little")
        if bits[n_samples:].any():
            findings.add(
                "validity",
                "bits behind the last sample's are set",
                section=section.name,
                field=name,
                offset=section.offset + section.size - 1,
                found=int(stored[-1]),
            )
        present[name] = bits[:n_samples].astype(np.bool_)
    return present
