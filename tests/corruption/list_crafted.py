"""Make every crafted shard of the tests; list what refuses it; exit with 1 if another does.

    python -m tests.corruption.list_crafted

In each one rule is broken, and all hashes are right again: it is the rule's own check that refuses.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardio.errors import ShardioError
from shardio.maintenance.verify.shard import verify_bytes
from tests.corruption import (
    test_crafted,
    test_forged_media,
    test_forged_records,
    test_forged_structure,
)
from tests.corruption.forge import (
    MEDIA_RULES,
    RULES,
    SMALL_VIDEOS,
    Change,
    Forgery,
    content_of,
    media_rules_samples,
    read_everything,
    rules_samples,
    small_planes,
)

Case = tuple[str, bytes, str, str]
"""A defect: the file, and the codes that a reader and a verification must report; "" for none."""


def crafted(folder: Path) -> Iterator[Case]:
    """All crafted shards."""
    sound = content_of(folder / "rules.shard", RULES, rules_samples())
    refused = [*test_forged_structure.STRUCTURE, *test_forged_records.BROKEN_VALUES]
    for what, change, code in refused:
        yield what, forged(sound, change), code, code
    for what, change, codes in test_forged_records.VERIFIED:
        yield what, forged(sound, change), "", codes[0]
    media = content_of(folder / "media.shard", MEDIA_RULES, media_rules_samples())
    for what, change, code in [*test_forged_media.BROKEN_MEDIA, *test_forged_media.STRUCTURE_MEDIA]:
        yield what, forged(media, change), code, code
    for what, change, codes in test_forged_media.VERIFIED_MEDIA:
        yield what, forged(media, change), "", codes[0]
    planes = content_of(folder / "planes.shard", SMALL_VIDEOS, small_planes())
    for what, change, _ in test_forged_media.FORGED_PLANES:
        yield what, forged(planes, change), "", "planes"
    for what, content in test_crafted.bombs(folder):
        code = test_crafted.BOMBS[what][-1]
        yield what, content, code, code
    for what, (content, reader_code, code) in test_crafted.optional_cases(folder).items():
        yield what, content, reader_code, code


def forged(sound: bytearray, change: Change) -> bytes:
    """Return a shard with one change, and all hashes right."""
    forgery = Forgery.of(sound)
    change(forgery)
    return forgery.seal()


def main() -> int:
    """List them; return the exit code."""
    n_made = n_met = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, content, reader_code, code in crafted(folder):
            path = folder / "crafted.shard"
            path.write_bytes(content)
            error = read_everything(path)
            found = getattr(error, "code", "") if isinstance(error, ShardioError) else ""
            findings = verify_bytes(memoryview(content), "crafted.shard").findings
            codes = sorted({finding.code for finding in findings})
            is_met = found == reader_code and code in codes
            n_made, n_met = n_made + 1, n_met + is_met
            said = f"reader: {found or '-':14} verify: {', '.join(codes) or '-'}"
            print(f"{what:50} {said}{'' if is_met else f'   EXPECTED {reader_code} {code}'}")
    print(f"{n_met}/{n_made} crafted shards are met by the rule that they break")
    return int(n_met < n_made)


if __name__ == "__main__":
    sys.exit(main())
