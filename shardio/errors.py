"""The exceptions that shardio raises; `docs/reference/errors.md` shows their tree.

Every class but ShardioError and DataError also derives from a built-in exception.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Self

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
    """The base class of shardio's exceptions."""


class DataError(ShardioError):
    """The data on disk is invalid."""


class ShardCorrupt(DataError, ValueError):
    """Bytes of a shard violate a rule of the format.

    `code` is the stable name of the rule (`"overlap"`, `"padding"`, …). The attributes `path`,
    `section`, `field`, `sample` (row in the shard), `offset` (byte in the file), `expected` and
    `found` are None where they do not apply, or until `at` sets them.
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

    def at(self, **attributes: str | int | None) -> Self:
        """Set attributes (path, field, …) that are still None; return the error itself."""
        missing = {name for name in attributes if getattr(self, name) is None}
        vars(self).update({name: attributes[name] for name in missing})
        return self


def _rebuild(kind: type[ShardCorrupt], what: str, state: dict[str, Any]) -> ShardCorrupt:
    """Unpickle a ShardCorrupt, whose constructor takes keywords."""
    error = kind(what, code=state["code"])
    error.__dict__.update(state)
    return error


class ChecksumMismatch(ShardCorrupt):
    """Bytes of a shard do not match their stored hash: they changed after they were written."""


class ShardChanged(ShardCorrupt):
    """A shard was truncated, replaced or modified while it was in use; shardio never does this.

    `code` is `"file_size"`, `"replaced"` or `"changed"`. If the change crashed a worker,
    `__cause__` is the WorkerDied. Restore the shard or publish the dataset again; then open the
    dataset again.
    """


class ShardIncomplete(DataError, ValueError):
    """The writer of the shard never finished it, so the shard cannot be read. Write it again."""


class ShardUnsupported(DataError, ValueError):
    """The shard is not damaged, but uses a format version or feature that is not supported."""


class DatasetCorrupt(DataError, ValueError):
    """A manifest file of a dataset is damaged, or disagrees with the shards that it lists."""


class MediaError(DataError, ValueError):
    """A video, image or audio file cannot be decoded."""


class ShardNotFound(ShardioError, FileNotFoundError):
    """There is no such shard file."""


class ShardExists(ShardioError, FileExistsError):
    """A file of this name exists; shards are never overwritten."""


class DatasetNotFound(ShardioError, FileNotFoundError):
    """There is no dataset at this path."""


class DatasetExists(ShardioError, FileExistsError):
    """The folder or URL already holds data or an interrupted conversion."""


class DatasetConflict(ShardioError, FileExistsError):
    """Another writer is writing here, or has changed the dataset or URL in the meantime."""


class InvalidArgument(ShardioError, ValueError):
    """An option or argument is invalid; the message states the valid values."""


class SchemaError(ShardioError, ValueError):
    """A schema is invalid, or a sample does not fit it."""


class TransformError(ShardioError, RuntimeError):
    """A user's transform raised (the message has the traceback) or returned an invalid result."""


class WorkerDied(ShardioError, RuntimeError):
    """A worker crashed, or raised an unexpected exception, before its task was finished."""


class TooManySkipped(ShardioError, RuntimeError):
    """More samples of an epoch failed than `max_skips` allows; the message names the last ones."""


class BatchTimeout(ShardioError, TimeoutError):
    """A batch was not ready within `timeout_s`; the message reports what each worker was doing."""


class StoreUnavailable(ShardioError, OSError):
    """An object store did not answer by the deadline; the message reports the last failure."""


class StoreAccessDenied(ShardioError, PermissionError):
    """An object store refuses access: credentials are missing, wrong, expired or insufficient."""


class CacheFull(ShardioError, OSError):
    """The disk is full, and all shards in the cache are in use; the message has the sizes."""


class ServerUnreachable(ShardioError, ConnectionError):
    """No server answers, or none accepts this client's key; the message lists the answers."""


class ClosedError(ShardioError, RuntimeError):
    """A loader, reader or writer was used after it was closed, or in a fork of the process."""


class InsufficientMemory(ShardioError, MemoryError):
    """There is too little memory, or a limit is too low; the message has the needed bytes."""


class UnsupportedEnvironment(ShardioError, RuntimeError):
    """A feature of the platform, a program or a package is missing; the message has a remedy."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of shardio.

    The command refers to a checkout: on package indexes, another project has the name `shardio`.
    """
    return f"pip install '.[{extra}]' in a checkout of shardio"


def import_extra(needs: str, extra: str, *modules: str) -> Any:
    """Import the modules that an extra of shardio installs, and return the first.

    Raises UnsupportedEnvironment if one is missing; the message begins with `needs`.
    """
    try:
        return [import_module(name) for name in modules][0]
    except ImportError as error:
        raise UnsupportedEnvironment(f"{needs} ({error}): {install_hint(extra)}") from error
