"""Conversions into object stores: first into a folder of this machine, then shard by shard there.

Whoever reads the URL sees nothing before all of it is there: the generation is written when every
shard is, `dataset.json` last, each only if nobody else was faster. What ends early is gone on with,
the conversion in the folder and the upload by what is not there yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardio.conversion.report import ConversionReport, InputReport
from shardio.disk import make_folder, remove_tree
from shardio.errors import DatasetExists, InvalidArgument, ShardNotFound
from shardio.format.checksum import hash_bytes
from shardio.format.layout import PAGE
from shardio.manifest import GENERATIONS, POINTER, Generation, holds_dataset, load
from shardio.manifest.shard_list import bytes_of
from shardio.remote.interruptible import side_by_side
from shardio.remote.objects import Objects
from shardio.remote.places import Remote
from shardio.writer import ShardSummary

_AT_ONCE: Final = 4
"""Shards that are uploaded side by side."""


class Upload:
    """A dataset on its way into a store.

    Args:
        url: where it is to be.
        storage_options: of the store.
        resume: whether it goes on with what an earlier one left.
        for_folders: options that only folders have, and whether they are given.

    Raises:
        DatasetExists: something is there; or an earlier one was converted, and not uploaded.
        InvalidArgument: an option is for folders, or the URL is a web server's.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None,
        *,
        resume: bool,
        **for_folders: bool,
    ) -> None:
        if given := [name for name, is_given in for_folders.items() if is_given]:
            raise InvalidArgument(f"{url}: {', '.join(given)}: only for a dataset in a folder")
        if url.lower().startswith(("http://", "https://")):
            raise InvalidArgument(
                f"{url}: web servers are only read: convert to a folder and copy it, or to a store "
                "(s3://, gs://, az://)"
            )
        remote = Remote.of(None, None, storage_options)
        self._objects, self._start_s = Objects(url, remote.options), time.monotonic()
        name = hash_bytes(f"{self._objects.endpoint} {self._objects.url}".encode())
        self.folder = os.path.join(remote.folder, "converting", f"{name:016x}")
        """The folder that it is converted into first."""
        self.is_converted = holds_dataset(self.folder)
        """Whether there is nothing left to do but to upload."""
        if self._objects.holds(POINTER) and not (self.is_converted and resume):
            raise DatasetExists(f"{url}: already holds a dataset; choose another place")
        if not resume and self.is_converted:
            raise DatasetExists(
                f"{self.folder}: what was converted for {url} is not uploaded to the end: go on by "
                "resume (--resume), or remove that folder"
            )
        if not resume and (found := self._objects.names()):
            raise DatasetExists(f"{url}: already holds data ({found[0]}); choose another place")
        make_folder(os.path.dirname(self.folder))

    def publish(self, report: ConversionReport | None = None) -> ConversionReport:
        """Upload what the folder holds, remove the folder, and say what was done.

        Raises:
            DatasetConflict: another writer has published there.
            StoreDenied, StoreUnavailable: resuming goes on later.
        """
        found, root = load(self.folder), Path(self.folder)
        side_by_side(_AT_ONCE, self._upload, [summary for summary, _ in found.files])
        for part in found.parts:
            self._objects.upload(f"{GENERATIONS}/{part.path.name}", str(part.path))
        report = report or _report_of(found)  # reads the inputs, which may lie in a part
        for name in (f"{GENERATIONS}/{found.number:06d}.json", POINTER):
            self._objects.put(name, (root / name).read_bytes(), exclusive=True)
        remove_tree(self.folder)
        elapsed_s = time.monotonic() - self._start_s
        return replace(report, dataset=self._objects.url, elapsed_s=elapsed_s)

    def _upload(self, shard: ShardSummary) -> None:
        """Write a shard, unless it is there: its last page has the hash of all it holds."""
        path = os.path.join(self.folder, shard.name)
        try:
            tail = self._objects.read_tail(shard.name, PAGE)
        except ShardNotFound:
            self._objects.upload(shard.name, path)
            return
        with open(path, "rb") as file:
            file.seek(-PAGE, os.SEEK_END)
            is_there = tail.n_bytes == shard.n_bytes and bytes(tail.data) == file.read()
        if not is_there:
            self._objects.upload(shard.name, path)


def _report_of(found: Generation) -> ConversionReport:
    """What there is to say of a conversion that ended earlier."""
    return ConversionReport(
        dataset="",
        kind=str(found.converter.get("name")),
        n_samples=found.n_samples,
        n_bytes=bytes_of(found.shards),
        elapsed_s=0,
        inputs=tuple(InputReport.of_json(dict(entry), {}) for entry in found.inputs),
        classes=found.classes,
        view=found.view,
    )
