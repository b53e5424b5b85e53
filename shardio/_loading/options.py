"""The options of a loader: users pass them as arguments; `LoaderOptions` is the checked record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, Self, TypedDict, get_args

import numpy as np

from shardio._base.callers import checking, one_of, takes_rng, warn
from shardio._engine.dispatch.backends import StartMethod
from shardio._engine.filling.batch_spec import BatchSpec, is_picture
from shardio._workers.processes.limits import default_budget, usable_cpus
from shardio.batch.collation import CollateKind, Collation, Sizes, parse_collate
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.media.audio import Sound
from shardio.order import FullShuffle
from shardio.order.ranks import Tail, check_rank
from shardio.order.sampling import (
    ORDERS,
    Sampler,
    Shuffle,
    check_count,
    check_not_distributed,
    check_one_argument,
    check_sampler,
    check_shuffle,
)
from shardio.outputs import Output, TorchDevice, check_device, resolve_output
from shardio.outputs.torch import OnTensors, as_transform, refuse_batch_transform
from shardio.samples.clip_view import ClipView, default_clip
from shardio.samples.clips import Clip
from shardio.samples.media import audio_schema, image_schema, media_fields, span_field
from shardio.samples.mixture import Mixture
from shardio.samples.open_dataset import OpenDataset, known_fields
from shardio.samples.packing import Pack
from shardio.samples.view import RowView, SampleView

OnError = Literal["raise", "skip"]
Layout = Literal["HWC", "CHW"]
"""The order of the axes of pictures: (height, width, channels), or channels first."""
_ON_ERROR: Final = get_args(OnError)
_LONGEST_S: Final = 1_000_000
"""The longest timeout. The kernel stores a timeout in milliseconds, as a number of 31 bits."""

TORCH_ADVICE: Final = {
    **dict.fromkeys(("batch", "bs"), "write batch_size="),
    "batches_ahead": "write prefetch=",
    "batch_sampler": "pass the order of samples as sampler=, and batch_size",
    "collate_fn": 'write collate="pad", "ragged", "list" or a function; equal shapes are stacked',
    "columns": "write fields=[…]",
    "distributed": "ranks are found in the environment; or write rank= and world_size=",
    "drop_last": 'write tail="drop" instead of drop_last=True',
    "epochs": "every `for` loop over the loader is one epoch",
    **dict.fromkeys(("format", "framework"), 'write output="torch"'),
    "generator": "write seed=; every epoch has a different order",
    "in_order": "batches are always in order",
    "multiprocessing_context": "write start_method=",
    "n_draws": "write sampler=shardio.WeightedSampler(weights, n_draws=…)",
    **dict.fromkeys(
        ("augment", "dtype", "image_size", "normalize", "pipelines", "resize", "transforms"),
        "write transform=shardio.transforms.Compose(…)",
    ),
    "num_replicas": "write world_size=",
    "num_samples": "write sampler=shardio.WeightedSampler(weights, n_draws=…)",
    "persistent_workers": "workers always stay until the loader is closed",
    "pin_memory": 'write device="cuda": batches are copied to the GPU from pinned memory',
    "pin_memory_device": "write device=",
    "prefetch_factor": "write prefetch=, the number of batches in addition to one per worker",
    "replacement": "write sampler=shardio.WeightedSampler(weights, replacement=…)",
    "target_transform": "write transform=f, which gets the whole sample, with its label",
    "timeout": "write timeout_s=; None corresponds to torch's 0",
    "weights": "write sampler=shardio.WeightedSampler(weights)",
    "worker_init_fn": "workers need no seeding: write transform(sample, rng), and draw from rng",
}
LOADER_ADVICE: Final = {
    "batch_size": "batch.n_rows is the number of rows of a batch",
    **dict.fromkeys(("epochs", "iter_epochs"), "write one `for` loop over the loader per epoch"),
    "fields": "write loader.schema",
    **dict.fromkeys(("length", "n_batches", "num_batches", "steps_per_epoch"), "write len(loader)"),
    "filter": "pass shardio.open(path).select(lambda columns: …, fields=[…])",
    "repeat": "every `for` loop over the loader is one epoch",
    **dict.fromkeys(("get_batch", "next"), "write next(iter(loader))"),
    "num_workers": "loader.stats().n_workers is the number of workers",
    **dict.fromkeys(
        ("batch_sampler", "sampler"),
        "the loader orders every epoch anew, on every rank; set_epoch is not needed",
    ),
    "set_epoch": "it is not needed: every iteration is the next epoch, shuffled anew on every rank",
    "reset": "it is not needed: every `for` loop is an epoch",
    **dict.fromkeys(("map", "with_transform"), "pass transform= or batch_transform="),
    "shuffle": "pass shuffle=True",
    **dict.fromkeys(("class_names", "classes"), "write loader.dataset.classes"),
    **dict.fromkeys(
        ("collate_fn", "device", "drop_last", "output", "rank", "seed", "tail", "transform")
        + ("world_size",),
        "options are passed to the loader, and it has no attributes for them",
    ),
    **dict.fromkeys(("shutdown", "stop", "terminate"), "write loader.close()"),
    "take": "write itertools.islice(loader, n)",
    **dict.fromkeys(("cuda", "to"), 'pass device="cuda"'),
}
"""Attributes of other libraries' loaders, and what to write instead."""
_OPEN_OPTIONS: Final = (
    *("access", "cache", "cache_bytes", "generation", "storage_options", "subset", "verify"),
)


def dataset_advice(call: str) -> dict[str, str]:
    """Return advice for users who pass options of `shardio.open` or of views to a loader.

    `call` is a correct call of the loader as a format string, in which {} stands for the dataset.
    """
    calls = {name: f"shardio.open(path, {name}=…)" for name in _OPEN_OPTIONS}
    calls |= dict.fromkeys(("select", "indices", "mask"), "shardio.open(path).select(…)")
    for view, kind, shown in (("clips", Clip, "frames"), ("pack", Pack, "length")):
        of_view = {each.name: each.name for each in fields(kind)} | {view: shown}
        for name in of_view.keys() - {"field", "pad"}:
            calls[name] = f"shardio.open(path).{view}({of_view[name]}=…)"
    calls["clip"] = calls["clips"]
    calls["split"] = 'shardio.open(path, subset="train")'
    return {name: f"write {call.format(given)}" for name, given in calls.items()} | {
        "preload": "write dataset.preload(fields) before, and pass that dataset",
        "sound": 'write decode={"audio": shardio.Sound(…)}, with the name of the field',
    }


def refuse_path(name: str, value: Any, expected: str = "an iterable of items") -> None:
    if not isinstance(value, str | bytes | bytearray | os.PathLike):
        return
    path = os.fsdecode(bytes(value)) if isinstance(value, bytes | bytearray) else os.fspath(value)
    raise InvalidArgument(
        f"{name} must be {expected}, and not a path or text; found {value!r}: "
        f"shardio.ShardLoader({path!r}, batch_size) loads the shards at a path, shardio.open() "
        "yields their samples one by one, and list() splits a text into characters"
    )


def warn_of_no_batch(epoch: int, n_samples: int, batch_size: int, world_size: int) -> None:
    step = f"{batch_size * world_size} of a step" + f" of {world_size} ranks" * (world_size > 1)
    warn(
        f"epoch {epoch} has no batch: tail='drop' leaves out all of its {n_samples} samples, which "
        f"are fewer than the {step}: pass a smaller batch_size than {batch_size}, or tail='short' "
        "or 'pad'",
        RuntimeWarning,
    )


def check_skips(on_error: Any, max_skips: Any) -> int | None:
    """Return the number of samples of an epoch that may be skipped; None with on_error="raise"."""
    skips = one_of("on_error", on_error, _ON_ERROR) == "skip"
    if max_skips is None:
        if skips:
            raise InvalidArgument(
                "on_error='skip' needs max_skips, the number of samples of an epoch that may fail, "
                "from 0 up"
            )
        return None
    if not skips:
        raise InvalidArgument(
            f"max_skips is for on_error='skip'; found max_skips={max_skips!r} with "
            f"on_error={on_error!r}"
        )
    return check_count("max_skips", max_skips, 0)


def check_seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or isinstance(value, bool) or not 0 < value <= _LONGEST_S:
        raise InvalidArgument(
            f"{name} must be a number of seconds above 0 and up to {_LONGEST_S}; found {value!r}"
        )
    return float(value)


def check_user_function(name: str, function: Any, given: str) -> Any:
    if function is None:
        return None
    if not callable(function):
        chain = isinstance(function, list | tuple)
        advice = ", such as shardio.transforms.Compose(a, b)" if chain else ""
        text = f"{name} must be callable{advice}; found {function!r}"
        if isinstance(function, Mapping) and function:
            field = f"{given}[{next(iter(function))!r}]"
            call = f"lambda {given}: {given} | {{{next(iter(function))!r}: f({field})}}"
            text += f": a function is given all fields; for f of one, write {name}={call}"
        raise InvalidArgument(text)
    if type(function).__module__ == "torchvision.transforms.transforms":
        kind = type(function).__name__
        wanted = "ToDtype(torch.float32, scale=True)" if kind == "ToTensor" else kind
        raise InvalidArgument(
            f"{name}: {kind} of torchvision.transforms takes a picture, and not a {given}: write "
            f"torchvision.transforms.v2.{wanted}"
        )
    if name == "transform":
        refuse_batch_transform(name, function)
    function = as_transform(function)
    takes_rng(name, given, function)
    return function


def _check_collation(name: str, asked: Any) -> Collation:
    collation = parse_collate(asked)
    if collation.function is not None:
        check_one_argument(name, "samples", collation.function)
    return collation


Collate = (
    CollateKind
    | Mapping[str, CollateKind | Sizes]
    | Callable[[list[dict[str, Any]]], Mapping[str, Any]]
)
_LAYOUTS: Final = get_args(Layout)
_START_METHODS: Final = ("zygote", "spawn", "thread")
_MAX_WORKERS: Final = 1024
"""The maximum number of workers. A worker takes several file descriptors and 10 MB of memory."""


Decode = bool | Mapping[str, bool | Sound]


class SharedKeywords(TypedDict, total=False):
    """The keywords of ShardLoader and of shardio.connect except `output`, for type checkers."""

    fields: Iterable[str] | None
    shuffle: Shuffle
    seed: int
    sampler: Sampler | None
    device: str | tuple[str, ...] | TorchDevice | None
    tail: Tail | None
    rank: int | None
    world_size: int | None
    prefetch: int | None
    memory_bytes: int | None
    on_error: OnError
    max_skips: int | None
    timeout_s: float | None
    collate: Collate
    decode: Decode


class LoaderKeywords(SharedKeywords, total=False):
    """The keywords of ShardLoader except `output`, for type checkers."""

    num_workers: int | None
    transform: Callable[..., Any] | None
    batch_transform: Callable[..., Any] | None
    reuse: bool
    start_method: StartMethod
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Media:
    """The fields to read, and the image and audio fields among them that are decoded."""

    fields: tuple[str, ...]
    pictures: tuple[str, ...]
    sounds: Mapping[str, Sound]


def _option(check: Callable[..., Any], *args: Any, default: Callable[[], Any] | None = None) -> Any:
    """Declare an option whose value in the record is `check(name, value, *args)`.

    If `default` is given, `default()` replaces the value None.
    """

    def checked(name: str, value: Any) -> Any:
        return default() if default is not None and value is None else check(name, value, *args)

    return field(metadata={"checked": checked})


def _check_batch_size(name: str, value: Any) -> int:
    if value is None:
        raise InvalidArgument(
            "batch_size is None; for single samples, write shardio.map_view.MapView(dataset)"
        )
    return check_count(name, value, 1)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The checked options of a ShardLoader, whose docstring describes them."""

    batch_size: int = _option(_check_batch_size)
    shuffle: Shuffle = _option(check_shuffle)
    seed: int = _option(check_count, 0)
    sampler: Sampler | None = _option(check_sampler, default=lambda: None)
    num_workers: int = _option(
        check_count, 0, _MAX_WORKERS, default=lambda: min(usable_cpus(), _MAX_WORKERS)
    )
    transform: Callable[..., Any] | None = _option(check_user_function, "sample")
    batch_transform: Callable[..., Any] | None = _option(check_user_function, "batch")
    output: Output
    device: str | tuple[str, ...] | None
    tail: Tail = _option(one_of, get_args(Tail), default=lambda: None)
    rank: int
    world_size: int
    prefetch: int | None = _option(check_count, 0, default=lambda: None)
    memory_bytes: int = _option(check_count, 1, default=default_budget)
    on_error: OnError
    max_skips: int | None
    timeout_s: float | None = _option(check_seconds)
    reuse: bool = _option(one_of, (True, False))
    collate: Collation = _option(_check_collation)
    start_method: StartMethod = _option(one_of, _START_METHODS)
    layout: Layout | None = _option(one_of, _LAYOUTS, default=lambda: None)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options from `arguments`, all arguments of a loader by their names."""
        found = {each.name: arguments[each.name] for each in fields(cls)}
        for each in fields(cls):
            if checked := each.metadata.get("checked"):
                with checking(each.name):
                    found[each.name] = checked(each.name, found[each.name])
        if found["shuffle"] is not False and found["sampler"] is not None:
            raise InvalidArgument(
                "shuffle and sampler both decide the order of an epoch: pass one of them"
            )
        with checking("rank, world_size"):
            rank, world_size = check_rank(found["rank"], found["world_size"])
        check_not_distributed(found["sampler"], rank, world_size)
        found |= {"rank": rank, "world_size": world_size}
        if found["tail"] is None:
            found["tail"] = "short" if world_size == 1 else "pad"
        functions = found["transform"], found["batch_transform"]
        uses_torch = any(isinstance(each, OnTensors) for each in functions)
        with checking("output"):
            found["output"] = resolve_output(found["output"], uses_torch=uses_torch)
        with checking("device"):
            found["device"] = device = check_device(found["device"], found["output"])
        with checking("on_error, max_skips"):
            found["max_skips"] = check_skips(found["on_error"], found["max_skips"])
        rules = found["collate"].default, *found["collate"].by_field.values()
        if isinstance(device, tuple) and any(rule.kind == "ragged" for rule in rules):
            raise InvalidArgument(
                "collate='ragged' makes arrays whose first axis is not the batch, so they cannot "
                f"be sharded over the devices {device!r}: use 'pad', or one device"
            )
        return cls(**found)


def resolve_view(
    given: OpenDataset | SampleView, fields: Any, decode: Any
) -> tuple[SampleView, Media]:
    """Return the view to load, and the fields that are read and decoded."""
    dataset = given.dataset if isinstance(given, SampleView) else given
    if isinstance(dataset, Mixture):
        fields = dataset.check_agreement(fields)
    schema, is_explicit = dataset.schema, fields is not None
    with checking("fields"):
        names = known_fields(fields, schema)
    with checking("decode"):
        decoded = _decoded(decode, names, schema)
    videos = media_fields(schema, names, "video")
    if isinstance(given, SampleView):
        view = given
        if packed := [name for name in view.videos if decoded.get(name) is False]:
            raise InvalidArgument(
                f"clips of {packed[0]!r} need decode=True: packets cannot be put into a batch"
            )
    else:
        view = _default_view(given, [name for name in videos if decoded[name]])
    names = view.stored_fields(names, is_explicit=is_explicit)
    sounds = {name: decoded[name] for name in media_fields(schema, names, "audio") if decoded[name]}
    for name in sounds:
        if span_field(name) in names:
            raise InvalidArgument(
                f"decoding {name!r} adds the field {span_field(name)!r}, which exists already: "
                "leave one of the two out with `fields`"
            )
    pictures = tuple(name for name in media_fields(schema, names, "image") if decoded[name])
    found = {name: Sound() if sound is True else sound for name, sound in sounds.items()}
    return view, Media(names, pictures, found)


def _decoded(decode: Any, names: Sequence[str], schema: Schema) -> dict[str, Any]:
    """Return True, False or a Sound for each image, audio or video field among `names`."""
    media = [name for name in names if schema[name].medium]
    if decode is True or decode is False:
        return dict.fromkeys(media, decode)
    read = f"media fields that are read: {', '.join(media) or 'none'}"
    if not isinstance(decode, Mapping):
        audio = next(iter(media_fields(schema, names, "audio")), "audio")
        raise InvalidArgument(
            "decode must be one of True, False, or a dict of media fields such as "
            f'decode={{"{audio}": shardio.Sound(…)}}; {read}; found {decode!r}'
        )
    for name, wish in decode.items():
        is_sound = isinstance(wish, Sound) and name in media and schema[name].medium == "audio"
        if name not in media or not (isinstance(wish, bool) or is_sound):
            raise InvalidArgument(
                "decode must be True, False, or a dict from media fields to True or False, or for "
                f"audio fields to a shardio.Sound; {read}; found {name!r}: {wish!r}"
            )
    return dict.fromkeys(media, True) | dict(decode)


def _default_view(dataset: OpenDataset, videos: Sequence[str]) -> SampleView:
    """Return the view of clips if a video is decoded, otherwise the view of rows."""
    if not videos:
        return RowView(dataset)
    if len(videos) > 1:
        raise InvalidArgument(
            f"a loader loads clips of one video field: choose one of {', '.join(videos)} with "
            "dataset.clips(field=…)"
        )
    if isinstance(dataset, Mixture) and not dataset.has_one_view:
        views = [dict(source.view) for source in dataset.sources]
        other = next(view for view in views if view != views[0])
        raise InvalidArgument(
            f"{dataset.path}: its sources do not have the same clips by default: {views[0]}, and "
            f"{other}: choose them with mixture.clips(…)"
        )
    return ClipView(dataset, replace(default_clip(dataset.view), field=videos[0]))


def batch_spec_of(
    options: LoaderOptions, view: SampleView, media: Media, n_positions_per_epoch: int | None
) -> BatchSpec:
    """Return the BatchSpec of a loader; check that the collation and audio fit the dataset.

    `n_positions_per_epoch` is the number of positions of every epoch; None if it is unknown.
    """
    # A block needs at most as many rows as an epoch has positions, unless batches are padded.
    is_whole = n_positions_per_epoch is None or options.tail == "pad"
    most = options.batch_size if is_whole else max(1, n_positions_per_epoch or 0)
    dataset = view.dataset
    # The fields of a transform's result are not known yet, and the sizes of clips are read later.
    if options.transform is None and not isinstance(view, ClipView):
        stored = Schema({name: dataset.schema[name] for name in media.fields})
        found = audio_schema(view.sample_schema(stored), media.sounds)
        options.collate.expand(image_schema(found, media.pictures))
    selection, tables = dataset.rows.row_list, view.tables().items()
    pictures = _picture_fields(view, media)
    transform, batch_transform, channels_first = _functions_for(options, pictures)
    return BatchSpec(
        source=dataset.worker_source,
        fields=media.fields,
        block_rows=min(options.batch_size, most),
        n_samples=len(view),
        is_full_shuffle=ORDERS[options.shuffle] is FullShuffle,
        seed=options.seed,
        transform=transform,
        batch_transform=batch_transform,
        collation=options.collate,
        skips=options.max_skips is not None,
        pictures=media.pictures,
        audio=view.audio(media.sounds),
        make_view=view.factory,
        tables={name: (table.array.dtype.str, len(table.array)) for name, table in tables},
        n_selected=None if selection is None else len(selection),
        channels_first=pictures if channels_first else None,
    )


def _picture_fields(view: SampleView, media: Media) -> frozenset[str]:
    """Return the fields of pictures: images, videos, and uint8 arrays shaped as pictures."""
    schema = view.dataset.schema
    mediums = {"image"} if view.clip and view.clip.pixels == "yuv420" else {"image", "video"}
    fields = {name: schema[name] for name in media.fields}
    return frozenset(
        name
        for name, field in fields.items()
        if field.medium in mediums or (field.array and is_picture(field.array))
    )


def _functions_for(
    options: LoaderOptions, pictures: frozenset[str]
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, bool]:
    """Return the transforms of samples and batches, and True if axes are permuted on delivery.

    Tensors of pictures have the channels first, unlike arrays. If the last function returns
    tensors, the axes are permuted only with layout="HWC", in the worker.
    """
    transform, batch_transform, layout = options.transform, options.batch_transform, options.layout
    if isinstance(batch_transform, OnTensors):
        is_first = isinstance(transform, OnTensors) and layout != "HWC"
        batch_transform = batch_transform.for_batches(pictures, channels_first=is_first)
    if layout == "HWC":
        if isinstance(transform, OnTensors):
            transform = transform.returning_arrays()
        if isinstance(batch_transform, OnTensors):
            batch_transform = batch_transform.returning_arrays()
    uses_tensors = any(isinstance(each, OnTensors) for each in (transform, batch_transform))
    return transform, batch_transform, layout == "CHW" and not uses_tensors
