"""Folders of video and arrays become memory-mapped shards that feed training loops.

Every public name is loaded from its module on first use. `import shardio` alone is therefore fast,
and imports neither numpy nor tinygrad nor av.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardio._base import __version__

if sys.platform == "win32":
    from shardio.errors import UnsupportedEnvironment

    raise UnsupportedEnvironment("shardio needs Linux; on Windows, run it inside WSL 2")

if TYPE_CHECKING:
    import shardio.export
    import shardio.map_view
    import shardio.measuring
    import shardio.transforms  # noqa: F401  # the last import that binds `shardio`
    from shardio.batch.batch import Batch
    from shardio.conversion import ConversionReport, Converter, Input, Outcome, convert
    from shardio.dataset.writer import DatasetWriter
    from shardio.errors import (
        DataError,
        InvalidArgument,
        MediaError,
        ShardCorrupt,
        ShardioError,
        WorkerDied,
    )
    from shardio.format.schema import Schema
    from shardio.format.types import Array, Audio, Bytes, Image, Json, List, Text, Video
    from shardio.format.types.streams import EncodedStream
    from shardio.items import Loader, SharedMemoryShim, load, load_with_workers
    from shardio.loader import ShardLoader
    from shardio.media.audio import Sound
    from shardio.multi import MultiLoader
    from shardio.order.sampling import WeightedSampler
    from shardio.pipeline import DataLoader, Pipeline
    from shardio.samples.mixture import mix
    from shardio.samples.shard_dataset import ShardDataset
    from shardio.samples.shard_dataset import ShardDataset as open
    from shardio.serving.client.remote_loader import RemoteLoader as connect
    from shardio.shard.reader import ShardReader
    from shardio.shard.writer import ShardWriter


__all__ = [
    "Array",
    "Audio",
    "Batch",
    "Bytes",
    "ConversionReport",
    "Converter",
    "DataError",
    "DataLoader",
    "DatasetWriter",
    "EncodedStream",
    "Image",
    "Input",
    "InvalidArgument",
    "Json",
    "List",
    "Loader",
    "MediaError",
    "MultiLoader",
    "Outcome",
    "Pipeline",
    "Schema",
    "ShardCorrupt",
    "ShardDataset",
    "ShardLoader",
    "ShardReader",
    "ShardWriter",
    "ShardioError",
    "SharedMemoryShim",
    "Sound",
    "Text",
    "Video",
    "WeightedSampler",
    "WorkerDied",
    "__version__",
    "connect",
    "convert",
    "load",
    "load_with_workers",
    "mix",
    "open",
]

# The modules of the public names; any other public name is an error.
_NAMES = {
    "shardio.batch.batch": ("Batch",),
    "shardio.conversion": ("ConversionReport", "Converter", "Input", "Outcome", "convert"),
    "shardio.dataset.writer": ("DatasetWriter",),
    "shardio.format.schema": ("Schema",),
    "shardio.format.types": ("Array", "Audio", "Bytes", "Image", "Json", "List", "Text", "Video"),
    "shardio.format.types.streams": ("EncodedStream",),
    "shardio.items": ("Loader", "SharedMemoryShim", "load", "load_with_workers"),
    "shardio.loader": ("ShardLoader",),
    "shardio.media.audio": ("Sound",),
    "shardio.multi": ("MultiLoader",),
    "shardio.order.sampling": ("WeightedSampler",),
    "shardio.pipeline": ("DataLoader", "Pipeline"),
    "shardio.samples.mixture": ("mix",),
    "shardio.samples.shard_dataset": ("ShardDataset", "open"),
    "shardio.serving.client.remote_loader": ("connect",),
    "shardio.shard.reader": ("ShardReader",),
    "shardio.shard.writer": ("ShardWriter",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
# The public modules, which are attributes, too.
_MODULES = (
    *("conversion", "errors", "export", "items", "maintenance", "map_view", "measuring"),
    *("media", "multi", "outputs", "pipeline", "serving", "transforms"),
)
# Names of other libraries, and what to write instead.
_ADVICE = {
    **dict.fromkeys(
        ("Dataset", "IterableDataset", "StreamingDataset", "load_dataset", "load_from_disk"),
        "write shardio.open(path)",
    ),
    **dict.fromkeys(
        ("ConcatDataset", "concat", "concatenate_datasets", "interleave_datasets"),
        "write shardio.mix([…], weights=[…])",
    ),
    **dict.fromkeys(
        ("DatasetFolder", "ImageFolder", "VideoFolder")
        + tuple(f"from_{kind}" for kind in ("dict", "folder", "generator", "list", "pandas")),
        "write shardio.convert(source, path), then shardio.open(path)",
    ),
    **dict.fromkeys(
        ("read_csv", "read_json", "read_parquet"),
        "write shardio.convert(file, path), then shardio.open(path)",
    ),
    **dict.fromkeys(
        ("DistributedSampler", "RandomSampler"),
        "write shardio.ShardLoader(path, batch_size, shuffle=True), which finds its rank",
    ),
    "MapView": "write shardio.map_view.MapView(path)",
    **dict.fromkeys(("MDSWriter", "ShardsWriter", "TarWriter"), "write shardio.DatasetWriter"),
    "Subset": "write dataset.select(indices)",
    **dict.fromkeys(("Array2D", "NDArray", "Tensor"), 'write shardio.Array("float32", shape)'),
    **dict.fromkeys(
        ("ClassLabel", "Label"), 'write shardio.Array("int64"), and DatasetWriter(…, classes=[…])'
    ),
    **dict.fromkeys(("Features", "Fields"), "write shardio.Schema({name: field})"),
    **dict.fromkeys(("String", "Value"), 'write shardio.Text() or shardio.Array("int64")'),
    **dict.fromkeys(
        ("WebDataset", "WebLoader"),
        "write shardio.convert(tars, path), then shardio.ShardLoader(path, batch_size)",
    ),
    **dict.fromkeys(("info", "inspect"), "show shardio.open(path), or run `shardio inspect`"),
    **dict.fromkeys(("show", "view"), "write shardio.open(path).show(), or run `shardio view`"),
    "Scalar": 'write shardio.Array("int64")',
    "WeightedRandomSampler": "write shardio.WeightedSampler(weights)",
    **{
        name: f"write shardio.maintenance.{name}"
        for name in ("add_column", "compact", "compute_stats", "diff", "merge", "repair", "reshard")
    },
    **dict.fromkeys(
        ("random_split", "split", "train_test_split"),
        "write shardio.maintenance.split(path, …), then shardio.open(path, subset=…)",
    ),
    **dict.fromkeys(("stats", "statistics"), "write shardio.maintenance.compute_stats(path)"),
    **dict.fromkeys(
        ("check", "verify", "verify_dataset"), "write shardio.maintenance.verify_dataset(path)"
    ),
    **{
        name: f"write shardio.transforms.{name}"
        for name in ("ColorJitter", "Compose", "HorizontalFlip", "Normalize", "OnTensors")
        + ("RandomResizedCrop", "Resize", "ToFloat")
    },
    **dict.fromkeys(("Reader", "read"), "write shardio.open(path)"),
    **dict.fromkeys(
        ("Writer", "save", "write"),
        "write shardio.convert(samples, path), or shardio.DatasetWriter(path, schema)",
    ),
}
# Public names of classes that have another name in their modules.
_NAMES_AT_HOME = {"connect": "RemoteLoader", "open": "ShardDataset"}


def __getattr__(name: str) -> object:
    """Import a public module, or a public name from its module, on first use (PEP 562)."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"shardio.{name}")
    if name in _ADVICE:
        from shardio._base.callers import refuse_name

        refuse_name(__name__, name, f"shardio has no {name!r}: {_ADVICE[name]}")
    if name not in __all__:
        text = f"module 'shardio' has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    home = import_module(_HOMES.get(name, "shardio.errors"))
    value: object = getattr(home, _NAMES_AT_HOME.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *__all__, *_MODULES})
