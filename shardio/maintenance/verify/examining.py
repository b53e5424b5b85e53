"""What a process that audits shards does; `auditors.py` is what gives it its shards.

Apart from it, as a worker would take longer to be there by what only main needs.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardio._workers.processes.channel import Channel, send_whole
from shardio.errors import ShardNotFound
from shardio.maintenance.verify.findings import Finding, Findings
from shardio.maintenance.verify.shard import Examined, examine
from shardio.storage.file_access import Access


def examine_anyhow(path: Path, access: Access) -> Examined:
    """Audit a shard; that it is missing or cannot be opened is a finding."""
    findings = Findings(path)
    try:
        return examine(path, access)
    except ShardNotFound as error:
        if path.is_symlink() or path.exists():
            findings.add("unreadable", str(error).removeprefix(f"{path}: "))
        else:
            findings.add("missing", "the shard is missing")
    except OSError as error:
        findings.add("unreadable", f"the file cannot be read: {error.strerror or error}")
    return Examined(findings.close(), 0)


def serve(access: Access, channel: Channel) -> None:
    """Audit one shard after another, as main names them, until it is done."""
    while (message := channel.recv()) is not None:
        found = examine_anyhow(Path(os.fsdecode(message)), access)
        send_whole(channel, json.dumps(asdict(found)).encode())


def examined_of(whole: bytes) -> Examined:
    """Rebuild what `serve` sent."""
    content: dict[str, Any] = json.loads(whole)
    findings = tuple(Finding(**finding) for finding in content.pop("findings"))
    return Examined(findings, **content)
