"""The base class of converters, and the inputs and outcomes that they work with."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, get_args

from shardio.dataset.generation import ROWS
from shardio.format.schema import Schema

OutcomeKind = Literal[
    "converted", "empty", "broken", "unsupported", "part", "not_processed", "duplicate", "modified"
]
OUTCOMES: Final = get_args(OutcomeKind)[:5]
"""The outcomes that a converter may return."""


@dataclass(frozen=True, slots=True)
class Input:
    """One file to convert.

    `name` is the path below the source, with `/` as separator; reports and datasets use it. `path`
    is the file on this machine, for opening only. `label` is the index of the class, -1 if there is
    none. `stamp` identifies the state of the file: its mtime and ctime in ns. `parts` are files
    that are read together with this file. If this file is itself a part, `part_of` is the name of
    the first input that has this part.
    """

    name: str
    path: str
    n_bytes: int
    label: int
    stamp: tuple[int, int] = (0, 0)
    parts: tuple[Input, ...] = ()
    part_of: str = ""


@dataclass(frozen=True, slots=True)
class Item(Input):
    """One item of a Python iterable, in place of a file.

    `name` and `path` describe the item, `hash` identifies it, and `packed` is its pickle for the
    workers.
    """

    hash: str = ""
    packed: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an input.

    `"converted"`; `"empty"`: readable, but without samples; `"unsupported"`: not of the converter's
    kind; `"broken"`: of this kind but unreadable, which makes the exit code 1; `"part"`: read
    together with the input named in `reason`, which gives the samples. Three outcomes are set
    by the conversion, for inputs that are not converted: `"not_processed"` after the input at which
    the conversion stopped and, in an append, `"duplicate"` if the dataset has the samples and
    `"modified"` if the input has changed since it was converted. `detail` is extra information to
    record, as JSON values.
    """

    kind: OutcomeKind
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


class Converter(ABC):
    """A converter of one kind of input: a frozen dataclass whose fields are its options.

    The constructor validates the options (InvalidArgument). The values of the options are recorded
    in the dataset. They must therefore be JSON values without machine names or absolute paths; an
    option that is None by default is recorded only if it is set. An append recreates the converter
    from the recorded options. Instances are pickled and sent to the workers.

    Attributes:
        kind: the name of the converter in the registry.
        version: a text that changes when the same input and options give other samples.
        step_s: the CPU time in seconds that each step of `samples` may take, plus one second per
            MiB of the input; None for no limit. A worker that takes longer is killed; the second
            time, the input is reported as broken. This protects against libraries that loop
            forever on damaged files. Not enforced with `workers=0`.
    """

    kind: ClassVar[str]
    version: ClassVar[str]
    step_s: ClassVar[float | None] = None

    @abstractmethod
    def schema(self) -> Schema:
        """Return the schema of the samples."""

    @abstractmethod
    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of one input and return its outcome. Must not write files.

        Samples are buffered until the outcome is known. The samples of a broken input are
        discarded, unless the user asked to keep them.

        Raises:
            MediaError: the input is broken; the message becomes the reason.
        """

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of the libraries that determine the bytes of the samples."""
        return {}

    def fitted(self, inputs: Sequence[Input]) -> Converter:
        """Return the converter with options inferred from the inputs, such as a schema.

        Called before the first input is read; the options are recorded like other options.
        """
        return self

    def parts(self, inputs: Sequence[Input]) -> Mapping[str, Sequence[str]]:
        """Map names of inputs to the names of their parts.

        Parts are inputs that are read together with another input. Parts give no samples and are
        not passed to `samples`. If a part changes, the input that it belongs to has changed.
        """
        return {}

    def class_names(self) -> Sequence[str] | None:
        """Return the class names if the inputs have their own labels, None if folders are classes.

        The sequence is empty if the classes have no names.
        """
        return None

    def view(self) -> Mapping[str, Any]:
        """Return the default view of a loader, as a generation stores it; by default rows."""
        return ROWS

    def error(
        self,
        source: Input,
        sample: Mapping[str, Any],
    ) -> tuple[float, int] | None:
        """Compare the first sample of an input with its original.

        Return the sum of squared pixel differences and the number of values; None if nothing is
        lost.
        """
        return None


def options_of(converter: Converter) -> dict[str, Any]:
    """Return the options to record: all except those that are None by default and not set."""
    found = {}
    for known in dataclasses.fields(converter):  # type: ignore[arg-type]
        value = getattr(converter, known.name)
        if value is not None or known.default is not None:
            found[known.name] = value
    return found
