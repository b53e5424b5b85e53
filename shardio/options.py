"""A loader's options: flat for users, one frozen and checked record inside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np

from shardio._engine.cpus import usable_cpus
from shardio._engine.memory import default_budget
from shardio._engine.recipe import Dct, Recipe
from shardio._engine.staff import StartMethod
from shardio.access.filesystems import Access
from shardio.choice import Choice, check_takes_one
from shardio.clips import Clip
from shardio.collation import Collation, Kind, Sizes, collation_of
from shardio.cutting import Cut, cut, default_clip, videos_among
from shardio.dataset import ShardDataset
from shardio.division import Tail
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.launchers import told_by_launcher
from shardio.mixture import Mixture
from shardio.pictures import decoded, picture_fields
from shardio.signatures import takes_rng
from shardio.units import VERIFY, Verify

Collate = Kind | Mapping[str, Kind | Sizes] | Callable[[list[dict[str, Any]]], Mapping[str, Any]]
Output = Literal["tinygrad", "numpy"]
OnError = Literal["raise", "skip"]
_ON_ERROR: Final = get_args(OnError)
_OUTPUTS: Final = get_args(Output)
_TAILS: Final = get_args(Tail)
_DCTS: Final = get_args(Dct)
_START_METHODS: Final = ("zygote", "spawn", "forkserver", "fork", "thread")
_MOST_RANKS: Final = 1 << 24
_MOST_WORKERS: Final = 1024
"""More of them than any machine has use for; each takes descriptors, and 10 MB of memory."""
_LONGEST_S: Final = 1_000_000
"""The kernel counts milliseconds in 31 bits."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a ShardLoader was asked for, checked and with defaults filled in; see there."""

    batch_size: int
    fields: tuple[str, ...]
    choice: Choice
    num_workers: int
    transform: Callable[..., Any] | None
    takes_rng: bool
    batch_transform: Callable[..., Any] | None
    batch_takes_rng: bool
    output: Output
    device: str | tuple[str, ...] | None
    tail: Tail
    rank: int
    world_size: int
    prefetch: int | None
    memory_bytes: int
    verify: Verify
    access: Access
    max_skips: int | None
    timeout_s: float | None
    reuse: bool
    collation: Collation
    start_method: StartMethod
    record: bool
    preload: bool
    pictures: tuple[str, ...]
    dct: Dct
    clip: Clip | None
    video: str | None


def check_options(
    schema: Schema,
    *,
    batch_size: int,
    fields: Iterable[str] | None,
    choice: Choice,
    num_workers: int | None,
    transform: Callable[..., Any] | None,
    batch_transform: Callable[..., Any] | None,
    output: Output,
    device: str | tuple[str, ...] | None,
    tail: Tail | None,
    rank: int | None,
    world_size: int | None,
    prefetch: int | None,
    memory_bytes: int | None,
    verify: Verify,
    access: Access,
    on_error: OnError,
    max_skips: int | None,
    timeout_s: float | None,
    reuse: bool,
    collate: Collate,
    start_method: StartMethod,
    record: bool,
    preload: bool,
    decode: bool,
    dct: Dct,
    clip: Clip | None,
    view: Mapping[str, Any],
) -> Options:
    """Check every option against what is acceptable, and `fields` against the schema.

    Raises:
        InvalidArgument: naming the option, what is acceptable, and what was found.
    """
    callable_ = _callable("transform", transform)
    batch_callable = _callable("batch_transform", batch_transform)
    names = _fields(fields, schema)
    decodes = _one_of("decode", decode, (True, False))
    if clip is not None and not decodes:
        raise InvalidArgument("clip needs decode=True: packets cannot be put into a batch")
    video = None
    if decodes:
        video, names = videos_among(schema, names, clip, is_asked=fields is not None)
    collation = collation_of(collate)
    if collation.function is not None:
        check_takes_one("collate", "samples", collation.function)
    pictures = picture_fields(schema, names) if decodes else ()
    if (
        transform is None and video is None
    ):  # else what it makes decides; or of which size clips are
        chosen = Schema({name: schema[name] for name in names})
        collation.expand(decoded(chosen) if pictures else chosen)
    rank, world_size = _place_among_ranks(rank, world_size)
    if tail is None:
        tail = "short" if world_size == 1 else "pad"
    return Options(
        batch_size=_count("batch_size", batch_size, 1),
        fields=names,
        choice=choice,
        num_workers=(
            usable_cpus()
            if num_workers is None
            else _count("num_workers", num_workers, 0, _MOST_WORKERS)
        ),
        transform=callable_,
        takes_rng=callable_ is not None and takes_rng("transform", "sample", callable_),
        batch_transform=batch_callable,
        batch_takes_rng=(
            batch_callable is not None and takes_rng("batch_transform", "batch", batch_callable)
        ),
        output=_one_of("output", output, _OUTPUTS),
        device=_device(device, output),
        tail=_one_of("tail", tail, _TAILS),
        rank=rank,
        world_size=world_size,
        prefetch=None if prefetch is None else _count("prefetch", prefetch, 0),
        memory_bytes=(
            default_budget() if memory_bytes is None else _count("memory_bytes", memory_bytes, 1)
        ),
        verify=_one_of("verify", verify, VERIFY),
        access=access,
        max_skips=_most_skips(on_error, max_skips),
        timeout_s=_seconds("timeout_s", timeout_s),
        reuse=bool(_one_of("reuse", reuse, (True, False))),
        collation=_collation(collation, device),
        start_method=_one_of("start_method", start_method, _START_METHODS),
        record=bool(_one_of("record", record, (True, False))),
        preload=bool(_one_of("preload", preload, (True, False))),
        pictures=pictures,
        dct=_one_of("dct", dct, _DCTS),
        # Named or not, the same field: loaders of the same clips take each other's states.
        clip=None if video is None else replace(clip or default_clip(view), field=video),
        video=video,
    )


def recipe_of(
    options: Options, dataset: ShardDataset, n_at_most: int | None, cut: Cut | None
) -> Recipe:
    """What is in the batches of a loader whose epochs have so many positions, None if unknown."""
    # No more rows than there are positions, unless a batch is filled up.
    is_whole = n_at_most is None or options.tail == "pad"
    most = options.batch_size if is_whole else max(1, n_at_most or 0)
    mixed = dataset.mixed if isinstance(dataset, Mixture) else None
    return Recipe(
        path=dataset.path if mixed is not None else os.path.abspath(dataset.path),
        fields=options.fields,
        block_rows=min(options.batch_size, most),
        n_samples=len(dataset),
        shuffle=options.choice.is_full,
        seed=options.choice.seed,
        verify=options.verify,
        access=options.access,
        transform=options.transform,
        takes_rng=options.takes_rng,
        subset=dataset.subset,
        generation=dataset.generation,
        skips=options.max_skips is not None,
        collation=options.collation,
        batch_transform=options.batch_transform,
        batch_takes_rng=options.batch_takes_rng,
        mixed=mixed,
        pictures=options.pictures,
        dct=options.dct,
        cut=cut,
    )


def cut_of(options: Options, dataset: ShardDataset) -> Cut | None:
    """Have a dataset show the clips that its loader was asked for; None if it has no videos.

    Raises:
        InvalidArgument, ShardCorrupt: as `cutting.cut` says; or it is a mixture.
    """
    if options.clip is None or options.video is None:
        return None
    if isinstance(dataset, Mixture):
        others = [name for name in options.fields if name != options.video]
        raise InvalidArgument(
            f"{dataset.path}: clips are cut out of the videos of one dataset; leave out "
            f"{options.video!r} (fields={others}), or load the sources one by one"
        )
    return cut(dataset, options.clip, options.video)


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if not any(value is k or (isinstance(value, str) and value == k) for k in known):
        raise InvalidArgument(
            f"{name} must be one of {', '.join(map(repr, known))}; found {value!r}"
        )
    return value


def _count(name: str, value: Any, least: int, most: int | None = None) -> int:
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_count or value < least or (most is not None and value > most):
        limit = "up" if most is None else f"to {most}"
        raise InvalidArgument(f"{name} must be an integer from {least} {limit}; found {value!r}")
    return int(value)


def _place_among_ranks(rank: Any, world_size: Any) -> tuple[int, int]:
    """Which of how many ranks this process is: as it was told, or as its launcher says."""
    if (rank is None) != (world_size is None):
        raise InvalidArgument(
            f"rank and world_size belong together; found rank={rank!r}, world_size={world_size!r}"
        )
    where = "rank"
    if rank is None:
        where, rank, world_size = told_by_launcher()
    n = _count("world_size", world_size, 1, _MOST_RANKS)
    if _count("rank", rank, 0) >= n:
        raise InvalidArgument(f"{where} must be below world_size, which is {n}; found {rank}")
    return int(rank), n


def _most_skips(on_error: Any, max_skips: Any) -> int | None:
    """How many samples of an epoch may be skipped; None for those who skip none."""
    skips = _one_of("on_error", on_error, _ON_ERROR) == "skip"
    if max_skips is None:
        if skips:
            raise InvalidArgument(
                "on_error='skip' needs max_skips: how many samples of an epoch may fail before it "
                "is an error, from 0 up"
            )
        return None
    if not skips:
        raise InvalidArgument(
            f"max_skips is for on_error='skip'; found max_skips={max_skips!r} with "
            f"on_error={on_error!r}"
        )
    return _count("max_skips", max_skips, 0)


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or isinstance(value, bool) or not 0 < value <= _LONGEST_S:
        raise InvalidArgument(
            f"{name} must be a number of seconds above 0 and up to {_LONGEST_S}; found {value!r}"
        )
    return float(value)


def _fields(fields: Any, schema: Schema) -> tuple[str, ...]:
    if fields is None:
        return tuple(schema)
    if isinstance(fields, str):
        raise InvalidArgument(f"fields must be a list of names; found the string {fields!r}")
    if not isinstance(fields, Iterable):
        raise InvalidArgument(f"fields must be a list of names; found {fields!r}")
    wanted = tuple(each for name in fields for each in _below(name, schema))
    is_known = all(isinstance(name, str) and name in schema for name in wanted)
    if not is_known or not wanted or len(set(wanted)) < len(wanted):
        known = ", ".join(schema)
        raise InvalidArgument(f"fields must be different ones of {known}; found {wanted!r}")
    return wanted


def _below(name: Any, schema: Schema) -> list[Any]:
    """The fields of a nested record, or else the name itself."""
    if not isinstance(name, str) or name not in schema.groups:
        return [name]
    return [each for each in schema if each.startswith(f"{name}.")]


def _callable(name: str, function: Any) -> Any:
    if function is not None and not callable(function):
        raise InvalidArgument(f"{name} must be callable; found {function!r}")
    return function


def _collation(collation: Collation, device: Any) -> Collation:
    rules = collation.others, *collation.named.values()
    if isinstance(device, tuple | list) and any(rule.kind == "ragged" for rule in rules):
        raise InvalidArgument(
            "collate='ragged' makes arrays that are not as long as the batch and cannot be cut "
            f"along it over the devices {tuple(device)!r}: ask for 'pad', or for one device"
        )
    return collation


def _device(device: Any, output: str) -> Any:
    if device is None:
        return None
    if output != "tinygrad":
        raise InvalidArgument(f"device is for output='tinygrad'; output is {output!r}")
    names = device if isinstance(device, tuple | list) else (device,)
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"device must be a name or a tuple of names; found {device!r}")
    return device if isinstance(device, str) else tuple(device)
