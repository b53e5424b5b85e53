"""Every error shardio raises.

Each class also derives from the builtin that fits, so that callers who know nothing of shardio
can catch what they expect.

    ShardioError
    ├── DataError                       something on disk is bad (exit code 1)
    │   ├── ShardCorrupt                ValueError      bytes of a shard break a rule of the format
    │   │   ├── ChecksumMismatch                        ... in particular: a hash does not match
    │   │   └── ShardChanged                            ... was cut short or replaced while in use
    │   ├── ShardIncomplete             ValueError      a writer never finished this file
    │   ├── ShardUnsupported            ValueError      needs a newer version or another feature
    │   ├── DatasetCorrupt              ValueError      dataset.json, a generation, shards disagree
    │   └── MediaError                  ValueError      a video or image cannot be decoded
    ├── ShardNotFound                   FileNotFoundError
    ├── ShardExists                     FileExistsError
    ├── DatasetNotFound                 FileNotFoundError
    ├── DatasetExists                   FileExistsError
    ├── DatasetConflict                 FileExistsError another writer published first
    ├── InvalidArgument                 ValueError      an option or argument is not acceptable
    ├── SchemaError                     ValueError      a schema or a sample is not acceptable
    ├── TransformError                  RuntimeError    the user's transform failed
    ├── WorkerDied                      RuntimeError    a worker process ended too early
    ├── TooManySkipped                  RuntimeError    more samples failed than may be skipped
    ├── BatchTimeout                    TimeoutError    a batch did not come in time
    ├── StoreUnavailable                OSError         an object store gave nothing for too long
    ├── StoreAccessDenied               PermissionError an object store refuses the credentials
    ├── CacheFull                       OSError         no room for a shard from an object store
    ├── ServerUnreachable               ConnectionError no server sends batches any more
    ├── ClosedError                     RuntimeError    something is used after close()
    ├── InsufficientMemory              MemoryError     says needed and available bytes
    └── UnsupportedEnvironment          RuntimeError    something is missing here (exit code 3)
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CacheFull",
    "ChecksumMismatch",
    "DataError",
    "DatasetConflict",
    "DatasetCorrupt",
    "DatasetExists",
    "DatasetNotFound",
    "UnsupportedEnvironment",
    "InvalidArgument",
    "ClosedError",
    "MediaError",
    "InsufficientMemory",
    "SchemaError",
    "ServerUnreachable",
    "ShardChanged",
    "ShardCorrupt",
    "ShardExists",
    "ShardIncomplete",
    "ShardNotFound",
    "ShardUnsupported",
    "ShardioError",
    "StoreAccessDenied",
    "StoreUnavailable",
    "TooManySkipped",
    "TransformError",
    "WorkerDied",
    "BatchTimeout",
]


class ShardioError(Exception):
    """Base of every error that shardio raises on purpose."""


class DataError(ShardioError):
    """Something on disk is bad: the data, not the call."""


class ShardCorrupt(DataError, ValueError):
    """Bytes of a shard break a rule of the format.

    `code` is a stable name of the rule (`"overlap"`, `"padding"`, …); the other attributes say
    where: `path`, `section`, `field`, `sample` (row in the shard), `offset` (byte in the file),
    `expected` and `found`. Each is None where it does not apply.
    """

    def __init__(
        self,
        what: str,
        *,
        code: str,
        path: str | None = None,
        section: str | None = None,
        field: str | None = None,
        sample: int | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        self.what, self.code, self.path, self.section = what, code, path, section
        self.field, self.sample, self.offset = field, sample, offset
        self.expected, self.found = expected, found
        super().__init__(what)

    def __str__(self) -> str:
        parts = [f"{self.path}: {self.what}" if self.path else self.what]
        for name in ("section", "field", "sample", "offset"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}")
        if self.expected is not None or self.found is not None:
            parts.append(f"expected {self.expected}, found {self.found}")
        return ", ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.__dict__.copy())


def _rebuild(kind: type[ShardCorrupt], what: str, state: dict[str, Any]) -> ShardCorrupt:
    """Unpickle a ShardCorrupt, whose constructor takes keywords."""
    error = kind(what, code=state["code"])
    error.__dict__.update(state)
    return error


class ChecksumMismatch(ShardCorrupt):
    """A stored hash does not match the bytes it covers: they changed after they were written."""


class ShardChanged(ShardCorrupt):
    """A shard was cut short, replaced or written to while in use: nothing published ever is.

    `code` is `"file_size"`, `"replaced"` or `"changed"`. Where a worker process was lost to it, the
    cause is the WorkerDied. Restore the shard, or publish the dataset anew, and open it again.
    """

    def at(
        self,
        *,
        section: str | None = None,
        field: str | None = None,
        sample: int | None = None,
        offset: int | None = None,
    ) -> ShardChanged:
        """Itself, with its place where that is not known yet."""
        if self.section is None:
            self.section = section
        if self.field is None:
            self.field = field
        if self.sample is None:
            self.sample = sample
        if self.offset is None:
            self.offset = offset
        return self


class ShardIncomplete(DataError, ValueError):
    """A writer never finished this file; nothing in it can be read. Write it again."""


class ShardUnsupported(DataError, ValueError):
    """The file needs a newer shardio, or a feature this one lacks; it is not damaged."""


class DatasetCorrupt(DataError, ValueError):
    """`dataset.json`, a generation, or the shards they name do not agree."""


class MediaError(DataError, ValueError):
    """A video, image or audio file cannot be decoded."""


class ShardNotFound(ShardioError, FileNotFoundError):
    """There is no such shard file."""


class ShardExists(ShardioError, FileExistsError):
    """There is a file of this name; shards are never overwritten."""


class DatasetNotFound(ShardioError, FileNotFoundError):
    """There is no dataset at this path."""


class DatasetExists(ShardioError, FileExistsError):
    """The folder already holds data."""


class DatasetConflict(ShardioError, FileExistsError):
    """Another writer published this generation first; nothing of theirs was changed."""


class InvalidArgument(ShardioError, ValueError):
    """An option or argument is not acceptable; the message lists what is."""


class SchemaError(ShardioError, ValueError):
    """A schema is invalid, or a sample does not fit it."""


class TransformError(ShardioError, RuntimeError):
    """The user's transform raised (the message holds the traceback), or its result does not fit."""


class WorkerDied(ShardioError, RuntimeError):
    """A worker process ended without finishing its task."""


class TooManySkipped(ShardioError, RuntimeError):
    """More samples of an epoch failed than `max_skips` allows; the message names the last."""


class BatchTimeout(ShardioError, TimeoutError):
    """A batch did not come within `timeout_s`; the message says what every worker was doing."""


class StoreUnavailable(ShardioError, OSError):
    """An object store gave nothing within the deadline; the message says what failed last."""


class StoreAccessDenied(ShardioError, PermissionError):
    """An object store refuses: credentials are missing, wrong or expired, or may not do this."""


class CacheFull(ShardioError, OSError):
    """The disk of the cache is full, and what lies in it is in use; the message has the bytes."""


class ServerUnreachable(ShardioError, ConnectionError):
    """No server answers, or none that knows this client's key; the message says what was heard."""


class ClosedError(ShardioError, RuntimeError):
    """A loader, reader or writer is used after it was closed, or in a forked child."""


class InsufficientMemory(ShardioError, MemoryError):
    """There is not enough memory; the message says needed and available bytes."""


class UnsupportedEnvironment(ShardioError, RuntimeError):
    """A platform feature, program or package is missing; the message says how to get it."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of shardio.

    It names the checkout: on package indexes, the name `shardio` is taken by another project.
    """
    return f"pip install '.[{extra}]' in a checkout of shardio"
