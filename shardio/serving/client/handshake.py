"""The opening of a session: the options that a client sends, and the facts that a server returns.

Options are sent as JSON; functions cannot be sent. The server does not trust the options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Final, Self

import numpy as np

from shardio.batch.batch import Batch
from shardio.errors import InvalidArgument
from shardio.media.audio import Sound
from shardio.order.sampling import WeightedSampler, holds_positions
from shardio.samples.clips import Clip
from shardio.samples.packing import Pack
from shardio.serving.client.protocol import VERSION, Address, MalformedMessage, member, number

RECORDS: Final[dict[str, type[Clip | Pack]]] = {"clips": Clip, "pack": Pack}
"""The options that select a view of the dataset, given as dicts of the view's arguments."""

KNOWN: Final = RECORDS.keys() | frozenset(
    "batch_size shuffle seed tail rank world_size verify on_error max_skips subset"
    " fields sampler collate decode".split()
)
_FRACTIONS: Final = ("fps", "seconds")
_FRACTION: Final = re.compile(r"[0-9]{1,20}(/[1-9][0-9]{0,19})?")

ELSEWHERE: Final = {
    "num_workers": "shardio serve --workers N",
    "transform": "shardio serve --transform module:function",
    "batch_transform": "shardio serve --batch-transform module:function",
    "access": "the server opens the dataset",
    "start_method": "the server starts the workers",
    "reuse": "every received batch has its own memory",
    "layout": "pictures arrive as (height, width, channels): permute them, x.movedim(-1, -3)",
}
"""The options that a remote loader does not accept, each with the reason or an alternative."""


def options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None as JSON values, or raise InvalidArgument."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in ELSEWHERE:
            raise InvalidArgument(f"{name} is not an option of a remote loader: {ELSEWHERE[name]}")
        if value is not None:
            found[name] = _as_json(name, value)
    return found


def _as_json(name: str, value: Any) -> Any:
    if name in RECORDS:
        try:
            RECORDS[name](**value)
        except TypeError:
            known = ", ".join(each.name for each in fields(RECORDS[name]))
            raise InvalidArgument(
                f"{name} must be a dict with the arguments of dataset.{name}({known}); "
                f"found {value!r}"
            ) from None
        return {option: _plain(given) for option, given in value.items()}
    if isinstance(value, Sound):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, WeightedSampler):
        options = {"replacement": value.replacement, "n_draws": value.n_draws}
        return {"weights": np.asarray(value.weights).tolist(), **options}
    if callable(value):
        raise InvalidArgument(
            f"{name} is a function, and code cannot be sent to a server; found {value!r}"
        )
    if name in ("collate", "decode") and isinstance(value, Mapping):
        return {str(field): _as_json("", rule) for field, rule in value.items()}
    if name == "sampler":
        if isinstance(value, Iterable) and not holds_positions(value):
            raise InvalidArgument(
                "sampler is iterated again for each epoch, and code cannot be sent to a server: "
                f"pass a sequence of positions; found {value!r}"
            )
        return np.asarray(list(value) if isinstance(value, Set | Mapping) else value).tolist()
    if name == "fields" and not isinstance(value, str):
        return list(value)
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a value with fractions as text, tuples as lists, and NumPy's scalars as numbers."""
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def options_from_json(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a client's message for ShardLoader, which checks their values."""
    if unknown := found.keys() - KNOWN:
        raise MalformedMessage(f"unknown options: {sorted(unknown)}")
    return {name: _from_json(name, value) for name, value in found.items()}


def _from_json(name: str, value: Any) -> Any:
    if name in RECORDS:
        return _record(RECORDS[name], value)
    if name == "decode" and isinstance(value, dict):
        return {
            field: _record(Sound, wish) if isinstance(wish, dict) else wish
            for field, wish in value.items()
        }
    if name == "sampler" and isinstance(value, dict):
        if value.keys() != {"weights", "replacement", "n_draws"}:
            raise MalformedMessage("sampler is not a WeightedSampler")
        return WeightedSampler(**value)
    if name == "collate" and isinstance(value, dict):
        return {field: _tuple(rule) for field, rule in value.items()}
    return value


def _record(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise MalformedMessage(f"an option is not a {kind.__name__}")
    given = {name: _option_value(name, part) for name, part in value.items()}
    try:
        return kind(**given)  # TypeError: an argument is unknown
    except InvalidArgument:
        raise
    # ArithmeticError occurs if a number is too large.
    except (ArithmeticError, TypeError, ValueError) as error:
        raise MalformedMessage(f"an option is not a {kind.__name__}: {error}") from error


def _option_value(name: str, value: Any) -> Any:
    if name in _FRACTIONS and isinstance(value, str):
        if not _FRACTION.fullmatch(value):  # Fraction("1e999999999") takes hours
            raise MalformedMessage(f"{name} is not a fraction")
        return Fraction(value)
    return _tuple(value)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A received batch, and the state of the loader after this batch."""

    batch: Batch
    state: State
    n_bytes: int


@dataclass(frozen=True, slots=True)
class LoaderInfo:
    """The properties of a loader at a server; `served` names the server's transforms, by option."""

    lineage: str
    generation: int
    n_batches: int
    state: State
    served: State

    @classmethod
    def parse(cls, head: Mapping[str, Any], address: Address) -> Self:
        """Parse an "opened" message."""
        if number(head, "version") != VERSION:
            raise InvalidArgument(
                f"{address} uses version {head['version']} of shardio's protocol, this client "
                f"{VERSION}: install the same shardio on both"
            )
        state = member(head, "state", dict)
        number(state, "epoch")
        lineage, served = member(head, "lineage", str), member(head, "served", dict)
        return cls(lineage, number(head, "generation"), number(head, "batches"), state, served)

    def check_follows(self, before: LoaderInfo, address: Address) -> None:
        """Raise InvalidArgument unless this loader has the same batches as the loader `before`."""
        for name in ("lineage", "served"):
            was, found = getattr(before, name), getattr(self, name)
            if was != found:
                raise InvalidArgument(
                    f"{address} serves other batches than the previous server: {name} is "
                    f"{found!r}, and was {was!r}"
                )
