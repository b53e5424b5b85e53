"""The peers of the race: their environments with pinned requirements, workloads and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Final

from benchmarks.racers.workloads import WORKLOADS, Epochs, Workload

Loader = Callable[[Workload, int], Epochs]

ENVIRONMENTS: Final[dict[str, tuple[str, ...]]] = {
    "shardio": (),
    "torch": (
        "torch==2.14.1",
        "numpy==2.4.6",
        "simplejpeg==1.9.0",
        "webdataset==1.0.2",
        "h5py==3.16.0",
        "litdata==0.2.76",
        "datasets==5.2.0",
        "torchcodec==0.17.0",
        "av==18.1.0",
    ),
    "mosaicml": ("mosaicml-streaming==0.13.0", "torch==2.14.1", "numpy==2.1.3"),
    "columns": (
        "pylance==14.0.2",
        "vortex-data==0.93.0",
        "tensorstore==0.1.86",
        "pyarrow==26.0.1",
        "numpy==2.4.6",
        "simplejpeg==1.9.0",
    ),
    "torch210": (  # the newest torch that LeRobot allows
        "torch==2.10.0",
        "numpy==2.2.6",
        "simplejpeg==1.9.0",
        "megatron-energon==7.4.1",
        "lerobot==0.4.4",
        "torchcodec==0.10.0",
        "datasets==4.8.5",
        "av==15.1.0",
    ),
    "grain": ("grain==0.2.18", "array_record==0.8.6", "numpy==2.4.6", "simplejpeg==1.9.0"),
    "threads": (
        "spdl==0.8.0",
        "spdl_io==0.8.0",
        "tinyloader==0.1.5",
        "numpy==2.4.6",
        "simplejpeg==1.9.0",
    ),
    "ffcv": (
        "ffcv==1.0.2",
        "numpy==1.26.4",
        "torch==2.14.1",
        "torchvision==0.29.1",
        "pillow==13.0.0",
        "opencv-python-headless==4.11.0.86",
    ),
}
"""The requirements of each virtual environment; "shardio" is the one that runs the benchmark."""

FRAMES: Final = ("frames",)
ROWS: Final = ("frames", "tokens")
ANY: Final = ("frames", "tokens", "jpeg")
REMOTE: Final = "remote"
ALL: Final = tuple(WORKLOADS)


@dataclass(frozen=True)
class Peer:
    """A loader in the race. `packages` are the packages whose versions a report names."""

    title: str
    workloads: tuple[str, ...]
    place: str
    """The function that opens the loader: `module.function`, relative to this package."""
    environment: str
    packages: tuple[str, ...]
    settings: str
    is_baseline: bool = False
    """True if it is not a library, but bare code that libraries are compared with."""


PEERS: Final[dict[str, Peer]] = {
    "limit": Peer(
        "limit",
        ("frames", "tokens", "tokens400", "jpeg"),
        "baselines.limit",
        "shardio",
        (),
        "forked workers gather rows of a memory-mapped file into shared blocks; no format, no"
        " checks; `jpeg`: simplejpeg decodes into the blocks",
        is_baseline=True,
    ),
    "memmap": Peer(
        "memmap",
        ANY,
        "baselines.memmap",
        "shardio",
        (),
        "one process, one `numpy.take` per batch from a memory-mapped file",
        is_baseline=True,
    ),
    "shardio": Peer(
        "shardio",
        ALL,
        "baselines.shardio",
        "shardio",
        ("shardio-loader",),
        "`ShardLoader(…, shuffle=True)`; every hash is verified, as by default; `remote`: `cache=`",
    ),
    "ffcv": Peer(
        "FFCV",
        ANY,
        "others.ffcv",
        "ffcv",
        ("ffcv",),
        "`OrderOption.RANDOM`, `os_cache=True`; it encodes JPEGs itself",
    ),
    "torchdl": Peer(
        "torch DataLoader",
        (*ANY, "augment"),
        "torch_loaders.torchdl",
        "torch",
        ("torch",),
        "a map-style dataset over a memory-mapped file, as in its documentation",
    ),
    "torchdl-batched": Peer(
        "torch DataLoader, batched",
        ANY,
        "torch_loaders.torchdl_batched",
        "torch",
        ("torch",),
        "a dataset that is indexed by batches: one `numpy.take` per batch",
    ),
    "spdl": Peer(
        "SPDL",
        ("frames", "augment", "jpeg"),
        "others.spdl",
        "threads",
        ("spdl",),
        "`DataLoader` with threads, `numpy.stack` as the aggregator",
    ),
    "grain": Peer(
        "Grain",
        ("frames", "jpeg"),
        "others.grain",
        "grain",
        ("grain", "array-record"),
        "ArrayRecord with groups of one, uncompressed; `jpeg`: a random-access source of files",
    ),
    "mds": Peer(
        "MosaicML streaming",
        (*ROWS, REMOTE),
        "torch_loaders.mds",
        "mosaicml",
        ("mosaicml-streaming",),
        "`ndarray` columns without compression, torch's DataLoader"
        "; `remote`: by boto3, whose client is closed before workers fork",
    ),
    "wds": Peer(
        "webdataset",
        (*FRAMES, REMOTE),
        "torch_loaders.wds",
        "torch",
        ("webdataset",),
        "tars of 64 MiB, `shardshuffle=100`, `shuffle(500)`, batches made by the workers"
        "; `remote`: over HTTP, by curl, with `cache_dir`",
    ),
    "hdf5": Peer(
        "h5py",
        ROWS,
        "torch_formats.hdf5",
        "torch",
        ("h5py",),
        "a contiguous dataset, one `read_direct` per row, in torch's DataLoader, batched",
    ),
    "hf": Peer(
        "Hugging Face datasets",
        ANY,
        "torch_formats.hf",
        "torch",
        ("datasets",),
        '`load_from_disk`, `with_format("arrow")`, in torch\'s DataLoader, batched; `jpeg`: a'
        " binary column, decoded by simplejpeg",
    ),
    "litdata": Peer(
        "LitData",
        (*ANY, REMOTE),
        "torch_formats.litdata",
        "torch",
        ("litdata",),
        "tensors in chunks of 64 MB, `StreamingDataLoader`; `tokens`: `TokensLoader`; `jpeg`:"
        " bytes, decoded by simplejpeg in `collate_fn`; `remote`: `cache_dir`; patched to accept"
        " HTTP without TLS",
    ),
    "lance": Peer(
        "Lance",
        (*ANY, REMOTE),
        "columnar.lance",
        "columns",
        ("pylance",),
        "fixed-size binary values, data format 2.1, `take`, four batches in flight; `jpeg`: binary"
        " values, decoded by simplejpeg in the two threads; `remote`: no cache",
    ),
    "vortex": Peer(
        "Vortex",
        ROWS,
        "columnar.vortex",
        "columns",
        ("vortex-data",),
        "`memory_map=True`, `scan(indices=…)` of sorted rows, four batches in flight",
    ),
    "tensorstore": Peer(
        "TensorStore",
        (*ROWS, REMOTE),
        "columnar.tensorstore",
        "columns",
        ("tensorstore",),
        "Zarr 3 with sharding: chunks of a frame or 16 rows, no compression, sorted reads of four"
        " batches in flight"
        "; `remote`: the driver `s3`, 64 requests at a time, no cache on disk",
    ),
    "torchcodec": Peer(
        "torchcodec",
        ("clips",),
        "clips.torchcodec",
        "torch",
        ("torchcodec", "torch"),
        '`seek_mode="approximate"`, a thread and `get_frames_in_range` for each clip, decoders that'
        " stay open, in torch's DataLoader",
    ),
    "pyav": Peer(
        "PyAV",
        ("clips",),
        "clips.pyav",
        "torch",
        ("av", "torch"),
        "containers that stay open, a thread for each clip, in torch's DataLoader",
    ),
    "energon": Peer(
        "Megatron-Energon",
        ("frames", "jpeg"),
        "energon.energon",
        "torch210",
        ("megatron-energon", "torch"),
        "indexed tars of 64 MiB, `CrudeWebdataset`, `repeat=False`, `max_samples_per_sequence=100`,"
        " `shuffle_buffer_size=500`, `prefetch_factor=4`; `jpeg`: bytes, decoded by simplejpeg"
        " in `batch`",
    ),
    "lerobot": Peer(
        "LeRobot",
        ("clips",),
        "lerobot.lerobot",
        "torch210",
        ("lerobot", "torchcodec", "torch"),
        "format 3, with the same streams of H.264, appended to one file; clips by"
        " `delta_timestamps`, decoded by torchcodec, in torch's DataLoader; `image_transforms`"
        " converts the float32 frames to bytes",
    ),
    "tinyloader": Peer(
        "tinyloader",
        ("frames", "jpeg"),
        "others.tinyloader",
        "threads",
        ("tinyloader",),
        "`load_with_workers`, one item per batch; shared memory from Python 3.13 on",
    ),
}


def peers_of(workload: str) -> list[str]:
    """Return the names of the peers that run a workload."""
    return [name for name, peer in PEERS.items() if workload in peer.workloads]


def loader_of(peer: Peer, workload: str = "") -> Loader:
    """Return the function that writes a peer's files if they are missing, and opens its loader.

    For the workload "remote", this is the function of the same name in the module `remote`.
    """
    module, _, name = peer.place.partition(".")
    if workload == REMOTE:
        module = workload
    found: Loader = getattr(import_module(f"benchmarks.racers.{module}"), name)
    return found


def installed_versions(peer: Peer) -> dict[str, str]:
    """Return the versions of a peer's packages in this interpreter."""
    return {package: metadata.version(package) for package in peer.packages}
