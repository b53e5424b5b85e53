"""What is converted that is no file: samples, items, data sets and data frames of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardio.conversion.data_frames import FrameRows, is_frame
from shardio.conversion.python_items import Indexing, convert_items, is_indexed, runs_of
from shardio.conversion.python_samples import append_samples, convert_samples, named
from shardio.conversion.report import ConversionReport
from shardio.conversion.request import Request
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema


@dataclass(frozen=True, slots=True)
class Given:
    """A source that lives in this program, and what is said of its samples."""

    src: Any
    samples: Callable[[Any], Any] | None
    names: Sequence[str] | None
    schema: Schema | None

    def convert(
        self, out: str, request: Request, *, append: bool, labels: bool
    ) -> ConversionReport:
        """Convert it into a dataset at `out`, or into more of it.

        Raises:
            InvalidArgument: it is nothing that samples come from, or an option is not for it.
        """
        self._check()
        self._check_source()
        if self.samples is None and (
            is_frame(self.src) or not is_indexed(self.src, request.workers)
        ):
            request.refuse_for_samples(labels=labels)
            to_dataset = append_samples if append else convert_samples
            schema, rows = self._rows(append=append)
            return to_dataset(rows, out, schema, request.shard_bytes)
        request.refuse_for_items(labels=labels)
        items, make, function = self._items()
        return convert_items(
            items,
            make,
            function,
            out,
            request,
            schema=self.schema,
            names=self.names,
            append=append,
        )

    def _check(self) -> None:
        if self.samples is not None and not callable(self.samples):
            raise InvalidArgument(
                f"samples must be a function of an item; found {type(self.samples).__name__}"
            )
        names = self.names
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise InvalidArgument(f"names must be a sequence of strings; found {names!r}")
        if self.samples is not None and isinstance(self.src, str | bytes):
            raise InvalidArgument(
                f"{self.src!r}: with samples=, expected an iterable of items, as "
                "sorted(folder.iterdir()); found one string"
            )

    def _check_source(self) -> None:
        kind = type(self.src)
        is_iterable = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
        if is_iterable and (self.samples is not None or not isinstance(self.src, Mapping)):
            return
        raise InvalidArgument(
            f"found a {kind.__name__}; expected a folder, an iterable of samples, each a dict, a "
            "data set, a data frame, or items with samples=, a function that makes samples of one"
        )

    def _items(self) -> tuple[Iterable[Any], Callable[[Any], Any], str]:
        """The items, what makes samples of one, and its name."""
        if self.samples is None:
            indexing = Indexing(self.src)
            return runs_of(len(self.src)), indexing, indexing.name
        return self.src, self.samples, name_of(self.samples)

    def _rows(self, *, append: bool) -> tuple[Schema | None, Iterable[Mapping[str, Any]]]:
        """The samples, and their schema where it is known before the first."""
        if not is_frame(self.src):
            return self.schema, self._named()
        if self.names is not None:
            raise InvalidArgument("names: a data frame has its own; rename its columns")
        rows = FrameRows(self.src)
        schema = rows.schema if self.schema is None and not append else self.schema
        return schema, rows

    def _named(self) -> Iterator[Mapping[str, Any]]:
        return (named(value, self.names) for value in self.src)


def name_of(function: Callable[[Any], Any]) -> str:
    """The name that a function is recorded by."""
    while hasattr(function, "func"):  # a partial
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))
