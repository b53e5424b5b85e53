"""The object store of a workload, as its peers use it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.request import urlopen

COUNTS: Final = "/_counts"
"""The path at which the server reports its counts, as JSON; no bucket may have such a name."""
KEY_ID: Final = "somebody"
SECRET: Final = "a secret of sixteen"
REGION: Final = "us-east-1"


@dataclass(frozen=True)
class Store:
    """An S3 server without TLS, and the folder of a peer's cache, which is empty at the start."""

    endpoint: str
    cache: Path

    def fetched(self) -> dict[str, float]:
        """Return the requests and the bytes since the start of the peer."""
        with urlopen(self.endpoint + COUNTS) as answer:
            counts = json.load(answer)
        return {
            "requests of the first epoch": counts["requests"],
            "MB of the first epoch": counts["bytes"] / 1e6,
        }
