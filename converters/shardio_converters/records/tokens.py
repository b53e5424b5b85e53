"""Tokens from raw binary files, as used by trainers of language models."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from shardio import Array, Converter, Input, InvalidArgument, MediaError, Outcome, Schema, Text
from shardio_converters.options import check_choice, check_number

SUFFIX: Final = ".bin"
DTYPES: Final = ("uint8", "uint16", "uint32", "int32", "int64")
LENGTH: Final = 1024

_MAX_LENGTH: Final = 1 << 24
_BLOCK_TOKENS: Final = 1 << 20  # the number of tokens read at a time
_HEADER_BYTES: Final = 1024  # 256 int32 numbers: magic, version, number of tokens, zeros
_HEADERS: Final = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""The magic and version of llm.c files, and the dtype of their tokens."""

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TokenFiles(Converter):
    """A converter that splits a stream of tokens into consecutive samples, without loss.

    With `eot`, each document is a sample. If the file begins with `eot`, every document begins with
    `eot`; otherwise, every document ends with `eot`. Without `eot`, a sample has `length` tokens,
    or fewer at the end.
    """

    kind: ClassVar[str] = "tokens"
    version: ClassVar[str] = "1"
    splits_by_file_name: ClassVar[bool] = True

    dtype: str | None = None
    """Dtype in the files: uint8, uint16, uint32, int32, int64."""
    eot: int | None = field(default=None, metadata={"metavar": "ID"})
    """The token between documents; each document is a sample."""
    length: int | None = None
    """Tokens per sample (default: 1024)."""

    def __post_init__(self) -> None:
        check_choice("dtype (--dtype)", self.dtype, DTYPES)
        if self.eot is not None and (type(self.eot) is not int or self.eot < 0):
            raise InvalidArgument(f"eot is {self.eot!r}; it must be a token, a whole number from 0")
        if self.eot is not None and self.eot > np.iinfo(str(self.dtype)).max:
            raise InvalidArgument(f"eot is {self.eot}: out of range for {self.dtype}")
        if self.eot is not None and self.length is not None:
            raise InvalidArgument("eot and length are mutually exclusive: eot defines the samples")
        if self.length is not None:
            check_number("length", self.length, 1, _MAX_LENGTH)

    def schema(self) -> Schema:
        """Return the fields of a sample."""
        tokens = Array(str(self.dtype), (None,))
        return Schema({"tokens": tokens, "label": Array("int64"), "source": Text()})

    def label_is_class(self) -> bool:
        """Return True: each sample has the label of its input."""
        return True

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a file."""
        if not source.name.lower().endswith(SUFFIX):
            return Outcome("unsupported", f"no {SUFFIX}")
        about = {"label": np.int64(source.label), "source": source.name}
        n_samples = 0
        length = self.length or LENGTH
        n_together = max(1, _BLOCK_TOKENS // length) * length
        with open(source.path, "rb") as file:
            blocks = self._blocks(file, n_together)
            parts = _rows(blocks, length) if self.eot is None else _documents(blocks, self.eot)
            for tokens in parts:
                yield {"tokens": tokens, **about}
                n_samples += 1
        return Outcome("converted") if n_samples else Outcome("empty", "holds no token")

    def _blocks(self, file: IO[bytes], n_together: int) -> Iterator[Tokens]:
        """Yield the tokens, `n_together` at a time."""
        dtype, n_tokens = _read_header(file)
        if dtype not in (None, self.dtype):
            raise MediaError(f"expected tokens of {self.dtype}, found {dtype}")
        numpy = np.dtype(self.dtype).newbyteorder("<")
        n_bytes = os.fstat(file.fileno()).st_size - file.tell()
        if dtype is None and n_bytes % numpy.itemsize:
            raise MediaError(f"{n_bytes:,} bytes are not a whole number of {self.dtype}")
        if dtype is not None and n_tokens * numpy.itemsize != n_bytes:
            raise MediaError(f"expected {n_tokens:,} tokens of {dtype}, found {n_bytes:,} bytes")
        while data := file.read(n_together * numpy.itemsize):
            yield np.frombuffer(data[: len(data) // numpy.itemsize * numpy.itemsize], numpy)


def _read_header(file: IO[bytes]) -> tuple[str | None, int]:
    """Return dtype and number of tokens of an llm.c file, or (None, 0); skip the header."""
    head = file.read(_HEADER_BYTES)
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    if len(numbers) < 3 or int(numbers[0]) not in {magic for magic, _ in _HEADERS}:
        file.seek(0)
        return None, 0
    dtype = _HEADERS.get((int(numbers[0]), int(numbers[1])))
    if dtype is None or len(head) < _HEADER_BYTES or numbers[3:].any():
        raise MediaError(f"unknown llm.c header: begins with {[*map(int, numbers[:3])]}")
    return dtype, int(numbers[2])


def _rows(blocks: Iterator[Tokens], length: int) -> Iterator[Tokens]:
    """Split blocks into samples; the size of each block but the last is a multiple of `length`."""
    for block in blocks:
        for start in range(0, len(block), length):
            yield block[start : start + length]


def _documents(blocks: Iterator[Tokens], eot: int) -> Iterator[Tokens]:
    """Split a stream before each `eot` if it begins with `eot`, otherwise after each `eot`."""
    waiting: list[Tokens] = []
    leads: bool | None = None
    for block in blocks:
        if leads is None:
            leads = bool(block[0] == eot)
        (places,) = (block == eot).nonzero()
        start = 0
        for stop in places if leads else places + 1:
            if waiting:
                yield np.concatenate([*waiting, block[start:stop]])
            elif stop > start:
                yield block[start:stop]
            waiting, start = [], stop
        if start < len(block):
            waiting.append(block[start:])
    if waiting:
        yield np.concatenate(waiting)
