"""Arrays given to user code: read-only in a transform, writable in what is given a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from shardio import Array, Audio, Image, Schema, ShardLoader, Sound, Video
from shardio.errors import TransformError
from shardio.media import demux, encode_jpeg
from shardio.samples.clips import Clip
from shardio.samples.packing import Pack
from tests.loading import bits, make_loader, write_dataset
from tests.media_made import write_flash

N, BATCH = 6, 3
Sample = dict[str, Any]
MEDIA = Schema({"video": Video(), "audio": Audio(optional=True), "label": Array("int64", (2,))})
PICTURES = Schema({"image": Image(), "other": Image(optional=True)})
TOKENS = Schema({"tokens": Array("uint16", (None,))})

VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("every", {}),
    "rows, always verified": ("every", {"verify": "always"}),
    "rows, pread": ("every", {"access": "pread"}),
    "pictures": ("pictures", {}),
    "clips": ("media", {"clip": Clip(4, step=15, times=True)}),
    "sound": ("media", {"fields": ["audio", "label"], "decode": {"audio": Sound(seconds="0.5")}}),
    "sound, int16": ("media", {"fields": ["audio"], "decode": {"audio": Sound(dtype="int16")}}),
    "streams": ("media", {"decode": False}),
    "windows": ("tokens", {"pack": Pack(8, targets=True, apart=True, eot=7, rest="pad")}),
    "windows, pread": ("tokens", {"pack": Pack(8), "access": "pread"}),
}
RUNNING = pytest.mark.parametrize(
    "running",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "start_method": "thread"},
    ],
    ids=["here", "2 workers", "threads"],
)
EVERY_VIEW = pytest.mark.parametrize("view", VIEWS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """One dataset for every way in which arrays come into being."""
    root = tmp_path_factory.mktemp("given")
    flash = write_flash(root / "flash.mkv", codec="flac", rate=16_000)
    rng = np.random.default_rng(0)

    def media() -> Iterator[Sample]:
        for i in range(N):
            sound = demux(str(flash), "audio") if i else None
            yield {"video": flash.read_bytes(), "audio": sound, "label": [i, i]}

    def pictures() -> Iterator[Sample]:
        for i in range(N):
            data = encode_jpeg(rng.integers(0, 256, (16, 24, 3), np.uint8))
            yield {"image": data, "other": data if i else None}

    tokens = ({"tokens": np.arange(8 + i, dtype=np.uint16)} for i in range(N))
    return {
        "every": write_dataset(root / "every", N, 2),
        "media": write_dataset(root / "media", N, 2, MEDIA, media()),
        "pictures": write_dataset(root / "pictures", N, 2, PICTURES, pictures()),
        "tokens": write_dataset(root / "tokens", N, 2, TOKENS, tokens),
    }


def arrays_in(name: str, value: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Return the arrays of a value: itself, those of a list, the table of a stream's packets."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from arrays_in(f"{name}[{i}]", each)
    elif hasattr(value, "packets"):
        yield f"{name}.packets", value.packets


def written(sample: Mapping[str, Any]) -> Sample:
    """Write into every array of a sample; report how many there are, and which could be written."""
    arrays = [each for name, value in sample.items() for each in arrays_in(name, value)]
    writable = []
    for name, array in arrays:
        try:
            array[...] = np.zeros((), array.dtype)
        except ValueError as error:
            assert "read-only" in str(error)
        else:
            writable.append(name)
    return {"n_arrays": len(arrays), "writable": writable}


@RUNNING
@EVERY_VIEW
def test_every_array_that_a_transform_is_given_is_read_only(
    folders: Mapping[str, str], view: str, running: dict[str, Any]
) -> None:
    name, options = VIEWS[view]
    options = {"output": "numpy", **options, **running}
    with make_loader(folders[name], BATCH, transform=written, **options) as loader:
        batches = list(loader)
    assert batches
    for batch in batches:
        assert (batch["n_arrays"] > 0).all()
        assert batch["writable"] == [[]] * batch.n_rows


def test_a_transform_that_writes_is_told_to_copy(folders: Mapping[str, str]) -> None:
    def darken(sample: Sample) -> Sample:
        sample["image"] -= 1
        return sample

    options: dict[str, Any] = {"output": "numpy", "num_workers": 0}
    with ShardLoader(folders["pictures"], BATCH, transform=darken, **options) as loader:
        with pytest.raises(
            TransformError, match=r"read-only\n.*given to a transform.*x = x\.copy\(\)\n"
        ):
            next(iter(loader))


def convolve(_: Sample) -> Sample:
    """Fail as a layer of torch."""
    raise TypeError("invalid combination of arguments - got (dict, Parameter, tuple)")


@pytest.mark.parametrize(
    ("transform", "hint"),
    [
        (lambda sample: sample / 255, "a transform is given a sample, a dict of fields"),
        (lambda sample: sample.flatten(), "a transform is given a sample"),
        (lambda sample: sample + 1, r"write lambda sample: {\*\*sample, 'image': f\(.*OnTensors"),
        (convolve, "a transform is given a sample, a dict of fields"),
        (
            lambda sample: {"x": sample["image"].permute(2, 0, 1)},
            r"pass shardio\.transforms\.OnTensors\(transform\)",
        ),
    ],
)
def test_a_transform_that_takes_something_else_is_told_what_it_is_given(
    folders: Mapping[str, str], transform: Any, hint: str
) -> None:
    options: dict[str, Any] = {"output": "numpy", "num_workers": 0}
    with ShardLoader(folders["pictures"], BATCH, transform=transform, **options) as loader:
        with pytest.raises(TransformError, match=rf"\n  .*{hint}.*\n  at sample 0 of"):
            next(iter(loader))


def test_a_function_that_collates_tensors_is_told_that_it_is_given_arrays(
    folders: Mapping[str, str],
) -> None:
    options: dict[str, Any] = {"output": "numpy", "num_workers": 0, "fields": ["image"]}

    def stacked(samples: Any) -> Sample:
        return {"image": [sample["image"].permute(2, 0, 1) for sample in samples]}

    with ShardLoader(folders["pictures"], BATCH, collate=stacked, **options) as loader:
        with pytest.raises(TransformError, match=r"\n  .*torch\.from_numpy\(x\).*\n  at the batch"):
            next(iter(loader))


def taking_over(batch: Any) -> Sample:
    if isinstance(batch, dict):
        return {name: copied(value) for name, value in batch.items()}
    return {name: [copied(sample[name]) for sample in batch] for name in batch[0]}


def overwriting(batch: Any) -> Sample:
    """Return a copy of what a batch function is given, and overwrite the original."""
    kept, n_arrays = taking_over(batch), 0
    rows = [batch] if isinstance(batch, dict) else batch
    for row in rows:
        for name, value in row.items():
            for _, array in arrays_in(name, value):
                array[...] = np.zeros((), array.dtype)
                n_arrays += 1
    assert n_arrays
    return kept


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def epochs(folder: str, **options: Any) -> list[Any]:
    with make_loader(folder, BATCH, output="numpy", **options) as loader:
        return [bits(batch)[2:] for _ in range(2) for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("taker", ["collate", "batch_transform"])
@pytest.mark.parametrize("view", [view for view in VIEWS if view != "streams"])
def test_every_array_that_a_function_of_batches_is_given_may_be_overwritten(
    folders: Mapping[str, str], view: str, taker: str, num_workers: int
) -> None:
    name, options = VIEWS[view]
    options = {**options, "num_workers": num_workers}
    found = epochs(folders[name], **options, **{taker: overwriting})
    kept = epochs(folders[name], **options, **{taker: taking_over})
    assert found == kept and found
