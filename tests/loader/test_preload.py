"""dataset.preload: all that it names lies in memory then, or it is said why not."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio.samples.preload
from shardio import Array, Bytes, InvalidArgument, Schema, ShardDataset
from shardio._workers.processes import limits
from shardio._workers.processes.limits import MemoryLimit
from shardio.errors import InsufficientMemory, ShardChanged
from shardio.format.layout import NO_FIELD, Kind
from shardio.samples.preload import Piece
from tests.loading import PATIENCE_S, write_dataset

N, N_SHARDS = 40, 2
SCHEMA = Schema({"image": Array("uint8", (100, 1024)), "blob": Bytes(), "label": Array("int64")})
IMAGES = N * 100 * 1024
OPTIONS: dict[str, Any] = {"num_workers": 0, "output": "numpy"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = (
        {"image": np.full((100, 1024), i, np.uint8), "blob": bytes([i]) * 200_000, "label": i}
        for i in range(N)
    )
    return write_dataset(tmp_path_factory.mktemp("preload") / "set", N, N_SHARDS, SCHEMA, samples)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every piece that is read: name of the file, offset and bytes."""
    pieces: list[tuple[str, int, int]] = []
    real = shardio.samples.preload._read_piece

    def noting(piece: Piece) -> None:
        pieces.append((os.path.basename(piece[0]), piece[1], piece[2]))
        real(piece)

    monkeypatch.setattr(shardio.samples.preload, "_read_piece", noting)
    return pieces


def section(folder: str, kind: Kind, name: str | None = None) -> tuple[int, int]:
    with ShardDataset(folder) as dataset:
        reader = dataset.reader(0)
        number = NO_FIELD if name is None else reader.schema.field_id(name)
        found = next(each for each in reader.sections if each.key == (kind, number, 0))
        return found.offset, found.size


def is_covered(pieces: list[tuple[str, int, int]], start: int, size: int) -> bool:
    missing = set(range(start // 4096, -(-(start + size) // 4096)))
    for _, offset, n_bytes in pieces:
        missing -= set(range(offset // 4096, -(-(offset + n_bytes) // 4096)))
    return not missing


def of_shard(pieces: list[tuple[str, int, int]], number: int) -> list[tuple[str, int, int]]:
    return [each for each in pieces if each[0].startswith(f"{number:06d}")]


def test_all_that_is_read_is_preloaded(folder: str, read: list[tuple[str, int, int]]) -> None:
    with ShardDataset(folder) as dataset:
        dataset.preload()
        for number in range(N_SHARDS):
            pieces = of_shard(read, number)
            assert is_covered(pieces, *section(folder, Kind.COLUMN, "image"))
            assert is_covered(pieces, *section(folder, Kind.PAYLOAD))
            assert is_covered(pieces, *section(folder, Kind.INDEX))


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [(["image"], IMAGES, 1.1 * IMAGES), (["blob"], N * 200_000, 1.1 * N * 200_000)],
)
def test_preloads_fields_in_use(folder: str, fields: list[str], least: float, most: float) -> None:
    with ShardDataset(folder) as dataset:
        assert least <= dataset.preload(fields) <= most


def test_a_selection_preloads_its_samples(folder: str, read: list[tuple[str, int, int]]) -> None:
    with ShardDataset(folder) as dataset, dataset.select([25, 21, 21]) as some:
        n_bytes = some.preload(["blob"])
    assert 400_000 <= n_bytes < 800_000
    assert not of_shard(read, 0)


def test_a_dataset_mixed_twice_is_read_once(folder: str, read: list[tuple[str, int, int]]) -> None:
    with ShardDataset(folder) as dataset:
        n_bytes = dataset.preload(["blob"])
    pieces = sorted(read)
    read.clear()
    with shardio.mix([folder, folder], weights=[1, 1]) as mixture:
        assert mixture.preload(["blob"]) == n_bytes
    assert sorted(read) == pieces


def test_what_does_not_fit_is_an_error_with_both_figures(
    folder: str, read: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "page_cache_limits", lambda *_: [MemoryLimit(IMAGES, "a box")])
    said = r"the fields to preload need [\d,]+ bytes .* only 4,096,000 bytes .*a box.*leave preload"
    with ShardDataset(folder) as dataset:
        with pytest.raises(InsufficientMemory, match=said):
            dataset.preload()
        assert not read
        dataset.preload(["label"])
        assert read


def test_a_file_that_is_shorter_by_then_is_named(tmp_path: Path) -> None:
    samples = ({"label": i} for i in range(2000))
    schema = Schema({"label": Array("int64")})
    path = write_dataset(tmp_path / "set", 2000, 1, schema, samples)
    with ShardDataset(path) as dataset:
        dataset.reader(0)
        os.truncate(dataset.reader(0).path, 8192)
        with pytest.raises(ShardChanged, match="cut short") as caught:
            dataset.preload(["label"])
        found = caught.value
        assert (found.path, found.offset) == (dataset.reader(0).path, 8192)
        assert (found.expected, found.found) == (dataset.shards[0].n_bytes, 8192)


def test_after_an_error_no_thread_reads_on(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_read: list[int] = []

    def failing(piece: Piece) -> None:
        n_read.append(piece[1])
        raise OSError(5, "Input/output error", piece[0])

    monkeypatch.setattr(shardio.samples.preload, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(shardio.samples.preload, "_read_piece", failing)
    with ShardDataset(folder) as dataset, pytest.raises(OSError, match="Input/output error"):
        dataset.preload(["image"])
    assert 1 <= len(n_read) <= shardio.samples.preload._N_THREADS


def test_ctrl_c_ends_it_within_its_pieces(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the threads begins another piece: they wait for the news in the first."""
    n_begun: list[int] = []
    go_on = threading.Event()

    def waiting(piece: Piece) -> None:
        n_begun.append(piece[1])
        if len(n_begun) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(shardio.samples.preload, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(shardio.samples.preload, "_read_piece", waiting)
    before = set(threading.enumerate())
    with ShardDataset(folder) as dataset, pytest.raises(KeyboardInterrupt):
        dataset.preload(["image"])
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
    assert 1 <= len(n_begun) <= shardio.samples.preload._N_THREADS


def test_a_limited_address_space_is_no_limit(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (n_mapped, n_mapped))
    monkeypatch.setattr(limits, "page_cache_limits", lambda *_: [MemoryLimit(1 << 40, "a box")])
    assert limits.available_bytes() < IMAGES
    with ShardDataset(folder) as dataset:
        assert dataset.preload(["image"]) >= IMAGES


def test_fields_that_do_not_exist_are_refused(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        with pytest.raises(
            InvalidArgument, match="fields must be different names among image, blob"
        ):
            dataset.preload(["frames"])
