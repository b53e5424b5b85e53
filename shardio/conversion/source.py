"""What a converter offers (`Source`), and how it is found.

Third-party converters are found through the entry-point group `shardio.converters`, in which ours
are as well, and are loaded when they are asked for. In a checkout that is not installed, ours lie
beside the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol, get_args

from shardio.dataset.generation import ROWS
from shardio.format.schema import Schema

OutcomeKind = Literal[
    "converted", "empty", "broken", "unsupported", "part", "not_processed", "duplicate", "modified"
]
OUTCOMES: Final = get_args(OutcomeKind)[:5]
"""Those that a converter may return."""


@dataclass(frozen=True, slots=True)
class Input:
    """One file to convert.

    `name` is its path below the source, with `/` between the parts: what reports and datasets
    hold. `path` is where it is on this machine, for opening only. `label` is the position of its
    folder among the classes, -1 for a file that lies directly in the source. `stamp` tells this
    state of the file from a later one: when its content and when its entry changed, in ns.
    `parts` are files that are read together with this one; `part_of` names the first input that
    has this one as a part.
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
    """One item of a list that samples are made of, instead of a file.

    `name` says what it is, `path` the same; `hash` tells it from others; `packed` is its pickle,
    for this program's own workers.
    """

    hash: str = ""
    packed: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an input.

    `"converted"`; `"empty"`: fine, but it gives no sample; `"unsupported"`: not of the
    converter's kind; `"broken"`: of its kind and unreadable, which is what exit code 1 means;
    `"part"`: read together with another input, which gives the samples and is named in `reason`.
    The driver adds `"not_processed"` for inputs after the one at which a conversion stopped. When
    it appends, it adds `"duplicate"` for inputs whose samples the dataset has, and `"modified"` for
    inputs that have changed since they were converted: neither is read again.
    `detail` is what is worth recording beside that, in JSON's terms.
    """

    kind: OutcomeKind
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """A converter: a frozen dataclass whose fields are its options.

    The constructor validates them (InvalidArgument); their values are recorded in the dataset, so
    they must be JSON values and name neither machines nor places; None, where it is the default, is
    not recorded. An append makes the converter again from what is recorded. Instances travel to
    the workers.

    A method `error(source, sample)` may compare a sample of an input, the first one, with what it
    was made of: the sum of squared differences of pixels and how many values those are, or None
    where nothing is lost.

    A method `fitted(inputs)` may look at all inputs before the first is read, and give the source
    with those options set that follow from them, as a schema does: they are recorded as any other.

    A method `parts(inputs)` may say which inputs are read together with others: their names, by the
    name of the input that gives the samples. What is in `Input.parts` then counts as its content:
    a change of any of them is a change of the input. Parts are not given to `samples`.

    A method `class_names()` may give the names of the classes where the numbers in `label` are the
    inputs' own: an empty sequence where they have no names. None: those of the folders.

    An attribute `step_s` may say how many seconds of a processor each step of `samples` may take,
    beside one for each MiB of the input. A worker that takes more is ended, twice, and the input is
    broken: for libraries that come to no end over damage. In this process (`workers=0`) none is.

    A method `view()` may say what the samples of a loader are by default, as a generation has it;
    without one they are the rows.
    """

    kind: ClassVar[str]  # the name it is found by
    version: ClassVar[str]  # changes when the same input and options give other samples

    def schema(self) -> Schema:
        """Give the schema of the samples."""
        ...

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of one input and return its outcome. Reads only, writes nothing.

        Samples are kept by the driver until the outcome is known: those of a broken input are
        discarded unless the user asked for them.

        Raises:
            MediaError: the input breaks; its text becomes the reason.
        """
        ...

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of the libraries that decide over the samples' bytes."""
        ...


def options_of(source: Source) -> dict[str, Any]:
    """Give the options of a source as they are recorded: without those that are left open."""
    found = {}
    for known in dataclasses.fields(source):  # type: ignore[arg-type]
        value = getattr(source, known.name)
        if value is not None or known.default is not None:
            found[known.name] = value
    return found


def classes_of(source: Source) -> tuple[str, ...] | None:
    """Give the names of the classes that the inputs themselves have; None where folders say it."""
    names: Callable[[], Sequence[str] | None] = getattr(source, "class_names", lambda: None)
    found = names()
    return None if found is None else tuple(found)


def view_of(source: Source) -> Mapping[str, Any]:
    """Give the default view of the datasets that a source makes: rows, unless it has a `view`."""
    view: Callable[[], Mapping[str, Any]] = getattr(source, "view", lambda: ROWS)
    return view()
