"""Records from ArrayRecord files."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar, Final

from shardio import Input, MediaError
from shardio_converters.records.record_source import RecordConverter
from shardio_converters.schema_spec import STEP_S

_NAME: Final = re.compile(r"\.array_?record(-\d+-of-\d+)?$", re.IGNORECASE)
_SIGNATURE: Final = bytes.fromhex("83af70d10d884a3f")  # of Riegeli files, the container


@dataclass(frozen=True, kw_only=True)
class ArrayRecords(RecordConverter):
    """A converter that makes one sample per ArrayRecord record; see `RecordConverter`."""

    kind: ClassVar[str] = "arrayrecord"
    what: ClassVar[str] = "ArrayRecord file"
    step_s: ClassVar[float] = STEP_S

    def libraries(self) -> Mapping[str, str]:
        """Return the version of array-record."""
        _reader()
        return {"array-record": version("array-record")}

    def read(self, source: Input) -> Generator[bytes] | None:
        """Return a generator of the records of a file; None for a file of another kind."""
        with open(source.path, "rb") as file:
            head = file.read(len(_SIGNATURE))
        if head != _SIGNATURE:
            if not _NAME.search(source.name):
                return None
            raise MediaError(
                f"expected to begin with {_SIGNATURE.hex()}, found {head.hex() or 'none'}"
            )
        return _records(os.fsencode(source.path))


def _reader() -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader


def _records(path: bytes) -> Generator[bytes]:
    try:
        with closing(_reader()(path, "max_parallelism:2")) as reader:
            if not reader.ok():  # e.g. truncated; `num_records` would return 0
                reader.read_all()
                raise MediaError("it cannot be opened")
            for _ in range(reader.num_records()):
                yield reader.read()
    except (RuntimeError, IndexError) as error:
        raise MediaError(f"damaged or truncated: {error}") from error
