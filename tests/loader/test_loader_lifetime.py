"""The lifetime of batches, and the effects of iterators, threads and forks on a loader."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Batch, ShardLoader
from shardio._engine.filling.sizing import n_blocks_wanted
from shardio.errors import ClosedError, TransformError
from shardio.storage.file_access import Access
from tests.loading import (
    PATIENCE_S,
    RAGGED,
    TWO_FIELDS,
    WORKERS,
    bits,
    check_against,
    make_loader,
    two_fields,
    write_dataset,
)

N = 200
IGNORES_COPIES = pytest.mark.filterwarnings("ignore:.*batches are copied:RuntimeWarning")
# Blocks of 8 samples of TWO_FIELDS: 49,152 + 64 + origins, in pages.
BATCH = 8
BLOCK_BYTES = 53_248


@pytest.fixture(scope="module")
def written() -> list[dict[str, Any]]:
    return [{**sample, "label": np.int64(sample["label"])} for sample in two_fields(N)]


def _ragged(n: int) -> list[dict[str, Any]]:
    """Make samples of sizes from nothing to a MiB within a batch, larger towards the end."""
    return [
        {
            "number": i,
            "note": f"{i} " * (0 if i % 3 == 0 else i * i),
            "blob": bytes([i]) * (1 << 20 if i % 16 == 15 else i % 7),
        }
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lifetime") / "ragged"
    return write_dataset(path, 64, 2, RAGGED, _ragged(64))


def _loader(folder: str, batch_size: int = BATCH, **options: Any) -> ShardLoader:
    return make_loader(folder, batch_size, **{"output": "numpy", "num_workers": 0, **options})


def _check_epoch(batches: list[Batch], written: list[dict[str, Any]]) -> None:
    """Make sure that these are all batches of an epoch, with the values that they should have."""
    for batch in batches:
        check_against(batch, written)
    seen = [i for batch in batches for i in batch.indices.tolist()]
    assert sorted(seen) == list(range(len(written)))


def _n_blocks(loader: ShardLoader) -> int:
    return len(loader._engine.pool)


# --- batches that are held ------------------------------------------------------------------


@WORKERS
def test_keeping_every_batch(folder: str, written: list[dict[str, Any]], num_workers: int) -> None:
    with _loader(folder, shuffle=True, num_workers=num_workers) as loader:
        kept = list(loader)
        again = list(loader)
        _check_epoch(kept, written)
        _check_epoch(again, written)
    _check_epoch(kept, written)  # also after close()


@WORKERS
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_batches_beyond_the_budget_are_private_copies_and_said_to_be_once(
    folder: str, written: list[dict[str, Any]], num_workers: int, blocks: int
) -> None:
    budget = blocks * BLOCK_BYTES
    with _loader(folder, shuffle=True, num_workers=num_workers, memory_bytes=budget) as loader:
        with pytest.warns(RuntimeWarning, match="batches are copied") as caught:
            kept = list(loader) + list(loader)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert loader._engine.pool.n_bytes <= budget
    _check_epoch(kept[: len(kept) // 2], written)
    _check_epoch(kept[len(kept) // 2 :], written)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("iterate", [iter, ShardLoader.progress])
def test_the_warning_of_copies_names_the_line_of_the_loop(
    folder: str, *, is_traced: bool, iterate: Callable[[ShardLoader], Iterable[Batch]]
) -> None:
    with _loader(folder, memory_bytes=BLOCK_BYTES) as loader:
        trace = loader.trace() if is_traced else contextlib.nullcontext()
        with trace, pytest.warns(RuntimeWarning, match="batches are copied") as caught:
            list(iterate(loader))
        assert [warning.filename for warning in caught] == [__file__]


@WORKERS
@IGNORES_COPIES
def test_kept_batches_are_right_while_blocks_grow(ragged: str, num_workers: int) -> None:
    samples = _ragged(64)
    options: dict[str, Any] = {"num_workers": num_workers, "memory_bytes": 12 << 20}
    with _loader(ragged, shuffle=True, **options) as loader:
        kept = list(loader) + list(loader)
    for batch in kept:
        for number, note, blob in zip(batch["number"], batch["note"], batch["blob"], strict=True):
            assert note == samples[number]["note"]
            assert blob == samples[number]["blob"]


@WORKERS
def test_a_far_larger_value_makes_its_block_grow(tmp_path: Path, num_workers: int) -> None:
    samples = [{"number": i, "note": "", "blob": b""} for i in range(1200)]
    samples[1111] = {"number": 1111, "note": "ü" * 1_000_000, "blob": b"x" * 5_000_000}
    folder = write_dataset(tmp_path / "set", 1200, 1, RAGGED, samples)
    with _loader(folder, 100, num_workers=num_workers) as loader:
        for _ in range(2):
            for batch in loader:
                for row, number in enumerate(batch.indices.tolist()):
                    assert batch["note"][row] == samples[number]["note"]
                    assert batch["blob"][row] == samples[number]["blob"]


@WORKERS
def test_slices_keep_batches(folder: str, written: list[dict[str, Any]], num_workers: int) -> None:
    with _loader(folder, num_workers=num_workers) as loader:
        slices = [batch["image"][-1:, ::2, 3] for batch in loader]
        for _ in loader:
            pass
    for i, piece in enumerate(slices):
        number = min(N, (i + 1) * BATCH) - 1
        np.testing.assert_array_equal(piece[0], written[number]["image"][::2, 3])


@IGNORES_COPIES
def test_batches_in_cycles_are_found_before_memory_is_short(folder: str) -> None:
    gc.disable()
    try:
        with _loader(folder, memory_bytes=3 * BLOCK_BYTES) as loader:
            for _ in range(3):
                for batch in loader:
                    cycle: list[Any] = [batch]
                    cycle.append(cycle)
            assert _n_blocks(loader) <= 3
    finally:
        gc.enable()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@WORKERS
@pytest.mark.parametrize("lane", ["safe", "reuse"])
def test_memory_and_descriptors_stay_level(folder: str, num_workers: int, lane: str) -> None:
    def epochs(n: int) -> tuple[int, int, int]:
        for i in range(n):
            for step, _ in enumerate(loader):
                if i % 2 and step == i % 11:
                    break
        return _n_blocks(loader), len(os.listdir("/proc/self/fd")), _resident_bytes()

    with _loader(folder, num_workers=num_workers, reuse=lane == "reuse") as loader:
        blocks, fds, resident = epochs(40)
        later_blocks, later_fds, later_resident = epochs(120)
    # As many as there should be, once loop and workers have met at their farthest; and those that
    # are lost to a pass for as long as a worker has not seen that it was cancelled.
    wanted = n_blocks_wanted(num_workers, None, BLOCK_BYTES)
    assert later_blocks <= max(blocks, wanted) + num_workers
    assert later_fds - fds <= 2 * (later_blocks - blocks)
    assert later_resident - resident < 8 << 20


@WORKERS
@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("failure", ["transform", "file"])
def test_what_a_loader_had_when_it_failed_does_not_wait_for_the_garbage_collector(
    swept: None, tmp_path: Path, num_workers: int, access: Access, failure: str
) -> None:
    path = write_dataset(tmp_path / "set", 40, 1, TWO_FIELDS, two_fields(40))
    shard = os.path.join(path, "000000-000.shard")

    def fail() -> type:
        with _loader(
            path,
            num_workers=num_workers,
            prefetch=0,
            access=access,
            transform=_fail_at_20 if failure == "transform" else None,
        ) as loader:
            try:
                for _ in loader:
                    if failure == "file":
                        os.truncate(shard, os.path.getsize(shard) // 2)
            except shardio.ShardioError as error:
                assert error is not error.__cause__
                return type(error)
        raise AssertionError("the epoch went through")

    fds = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        found = fail()
        left = len(os.listdir("/proc/self/fd"))
    finally:
        gc.enable()
    # Of a page that was cut in its middle the rest is zeros: damage, to whoever reads it first.
    assert issubclass(found, TransformError if failure == "transform" else shardio.ShardCorrupt)
    assert left == fds  # a block's map has one of its own


def _fail_at_20(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] == 20:
        raise ValueError("20")
    return sample


# --- tensors --------------------------------------------------------------------------------


def _label_of(image: Any) -> int:
    """Return the sample of two_fields of this image: its first pixel holds it up to 256."""
    return int(image[0, 0])


@pytest.mark.cpu_device
@WORKERS
@IGNORES_COPIES
@pytest.mark.parametrize("memory_bytes", [None, 3 * BLOCK_BYTES])
def test_kept_tensors_realized_and_lazy_hold_their_own_batch(
    folder: str, written: list[dict[str, Any]], num_workers: int, memory_bytes: int | None
) -> None:
    kept: list[tuple[Any, Any, Any, Any, list[int]]] = []
    options: dict[str, Any] = {"num_workers": num_workers, "memory_bytes": memory_bytes}
    with ShardLoader(folder, BATCH, shuffle=True, **options) as loader:
        for batch in loader:
            image, label = batch["image"], batch["label"]
            lazy = image.cast("int32").sum(axis=(1, 2)) + label
            done = (image[:, 0, 0].cast("int32") + 1).realize()
            kept.append((image[:, 3], lazy, done, label, batch.indices.tolist()))
        for batch in loader:  # fills every block that is free with something else
            del batch
    for piece, lazy, done, label, numbers in kept:
        images = np.stack([written[i]["image"] for i in numbers])
        np.testing.assert_array_equal(piece.numpy(), images[:, 3])
        np.testing.assert_array_equal(lazy.numpy(), images.sum((1, 2), dtype=np.int32) + numbers)
        np.testing.assert_array_equal(done.numpy(), images[:, 0, 0].astype(np.int32) + 1)
        assert label.tolist() == numbers


@pytest.mark.cpu_device
@WORKERS
def test_tensors_are_reused(folder: str, written: list[dict[str, Any]], num_workers: int) -> None:
    seen: list[int] = []
    tensors = set()
    with ShardLoader(folder, BATCH, shuffle=True, num_workers=num_workers, reuse=True) as loader:
        for _ in range(2):
            for batch in loader:
                tensors.add(id(batch["image"]))
                found = batch["image"].numpy()
                for value, number in zip(found, batch.indices.tolist(), strict=True):
                    np.testing.assert_array_equal(value, written[number]["image"])
                assert batch["label"].tolist() == batch.indices.tolist()
                seen += batch.indices.tolist()
        assert len(tensors) <= _n_blocks(loader)
    assert sorted(seen) == sorted([*range(N), *range(N)])


@pytest.mark.cpu_device
def test_a_device_that_does_not_exist_is_refused_and_nothing_is_left(folder: str) -> None:
    n_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(shardio.InvalidArgument, match="NODEVICE"):
        ShardLoader(folder, BATCH, device="NODEVICE", num_workers=1)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= n_fds


@pytest.mark.cpu_device
def test_a_batch_that_cannot_be_sharded_is_an_error_and_costs_no_block(folder: str) -> None:
    with ShardLoader(
        folder, 7, device=("CPU", "CPU:1"), num_workers=0, memory_bytes=2 * BLOCK_BYTES
    ) as loader:
        for _ in range(8):
            with pytest.raises(shardio.InvalidArgument, match="cannot be sharded"):
                list(loader)
        assert _n_blocks(loader) <= 2


# --- reuse ----------------------------------------------------------------------------------


@WORKERS
def test_only_reuse_overwrites_batches(folder: str, num_workers: int) -> None:
    first_pixels = {}
    for reuse in (False, True):
        # Few blocks: of as many as there are batches, each may lie in one of its own.
        with _loader(folder, num_workers=num_workers, prefetch=2, reuse=reuse) as loader:
            images = [batch["image"] for batch in loader]
            first_pixels[reuse] = {_label_of(image[0]) for image in images}
            addresses = {image.ctypes.data for image in images}
            assert (len(addresses) == len(images)) != reuse
    assert len(first_pixels[False]) == len(range(0, N, BATCH))
    assert len(first_pixels[True]) < len(first_pixels[False])


@WORKERS
def test_reuse_in_one_block(folder: str, written: list[dict[str, Any]], num_workers: int) -> None:
    with _loader(folder, num_workers=num_workers, reuse=True, memory_bytes=BLOCK_BYTES) as loader:
        for _ in range(2):
            for batch in loader:
                check_against(batch, written)
        assert _n_blocks(loader) == 1


# --- several iterators ----------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("lane", ["safe", "reuse"])
def test_iterators_of_one_loader_do_not_disturb_each_other(
    folder: str, written: list[dict[str, Any]], num_workers: int, lane: str
) -> None:
    options = {"shuffle": True, "num_workers": num_workers, "reuse": lane == "reuse"}
    with _loader(folder, **options) as loader:
        n_pairs = 0
        for first, second in zip(loader, loader, strict=True):
            assert (first.epoch, second.epoch) == (0, 1)
            check_against(first, written)
            check_against(second, written)
            n_pairs += 1
        assert n_pairs == len(loader)
        with _loader(folder, shuffle=True) as reference:
            expected = [[bits(batch) for batch in reference] for _ in range(3)]
        for outer in loader:
            if outer.step == 3:
                (inner,) = [[bits(batch)[2:] for batch in loader]]
                assert len(inner) == len(expected[0])
            check_against(outer, written)


@WORKERS
@pytest.mark.parametrize("steps", [0, 1, 7, 24])
def test_a_loop_can_be_left_after_any_step_and_the_next_epoch_is_whole(
    folder: str, written: list[dict[str, Any]], num_workers: int, steps: int
) -> None:
    with _loader(folder, num_workers=num_workers, shuffle=True) as loader:
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        del iterator
        with contextlib.suppress(KeyError):
            for batch in loader:
                batch["no such field"]
        _check_epoch(list(loader), written)
        assert loader.epoch == 2


# --- threads and forks ----------------------------------------------------------------------


@WORKERS
def test_iterators_in_threads(folder: str, written: list[dict[str, Any]], num_workers: int) -> None:
    with _loader(folder, num_workers=num_workers, shuffle=True) as loader:
        found: list[list[Batch]] = []
        threads = [
            threading.Thread(target=lambda: found.append(list(loader)), daemon=True)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(found) == 4
        for batches in found:
            _check_epoch(batches, written)


def _in_fork(work: Any) -> str:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: this process has threads
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


@WORKERS
def test_fork_use_is_refused(folder: str, written: list[dict[str, Any]], num_workers: int) -> None:
    with _loader(folder, num_workers=num_workers) as loader:
        steps = iter(loader)
        kept = [next(steps)]

        def misuse() -> str:
            told = []
            for use in (lambda: next(steps), lambda: next(iter(loader)), lambda: list(loader)):
                try:
                    use()
                except ClosedError as error:
                    told.append(str(error))
            loader.close()
            return "\n".join(told)

        told = _in_fork(misuse).splitlines()
        assert len(told) == 3
        assert all("create another loader in this process" in line for line in told)
        kept += steps
        _check_epoch(kept, written)


def test_a_fork_can_have_a_loader_of_its_own(folder: str) -> None:
    def load() -> str:
        with _loader(folder, num_workers=1) as mine:
            return str(sum(batch.n_rows for batch in mine))

    with _loader(folder, num_workers=1) as loader:
        assert next(iter(loader)).n_rows == BATCH
        assert _in_fork(load) == str(N)
        assert len(list(loader)) == len(loader)


# --- the end of a loader --------------------------------------------------------------------


@WORKERS
def test_use_after_close(folder: str, written: list[dict[str, Any]], num_workers: int) -> None:
    loader = _loader(folder, num_workers=num_workers)
    steps = iter(loader)
    batch = next(steps)
    loader.close()
    loader.close()
    check_against(batch, written)
    for use in (lambda: next(steps), lambda: iter(loader)):
        with pytest.raises(ClosedError, match="is closed: use it inside its `with` block, or cre"):
            use()
    assert len(loader) == N // BATCH


@WORKERS
def test_a_loader_that_nobody_refers_to_closes_itself(folder: str, num_workers: int) -> None:
    loader = _loader(folder, num_workers=num_workers)
    engine = loader._engine
    for _ in loader:
        break
    gone = weakref.ref(loader)
    gc.disable()  # by reference counts alone
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ClosedError):
        engine.layout()


@WORKERS
def test_iterators_keep_it(folder: str, written: list[dict[str, Any]], num_workers: int) -> None:
    steps = iter(_loader(folder, num_workers=num_workers))
    gc.collect()
    _check_epoch(list(steps), written)


@pytest.mark.parametrize("first", [0, 13])
def test_close_in_another_thread_ends_a_loop_without_workers(folder: str, first: int) -> None:
    def close(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == first:
            closer.start()
            is_closing.wait(PATIENCE_S)
        return sample

    def closing() -> None:
        loader._engine._backend.close()
        is_closing.set()
        loader.close()

    is_closing = threading.Event()
    closer = threading.Thread(target=closing)
    loader = _loader(folder, transform=close)
    with pytest.raises(ClosedError):
        list(loader)
    closer.join(PATIENCE_S)
    assert not closer.is_alive()


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize(
    ("running", "given"),
    [
        ((2, "spawn"), {}),
        *itertools.product(
            [(0, "zygote"), (2, "zygote"), (2, "thread")],
            [{}, {"reuse": True}, {"transform": dict, "collate": "pad"}],
        ),
    ],
)
def test_close_releases_all(folder: str, running: tuple[int, str], given: dict[str, Any]) -> None:
    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        names = [each.name for each in threading.enumerate()]
        n_threads = sum(name.startswith("shardio-worker") for name in names)
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:shardio"), n_threads

    options: dict[str, Any] = {"output": "numpy", **given}
    options["num_workers"], options["start_method"] = running
    with ShardLoader(folder, 10, **options) as first:
        list(first)  # what is imported and opened once
    before = held()
    loader = ShardLoader(folder, 10, **options)
    assert sum(len(batch["label"]) for batch in loader) == N
    loader.close()
    assert held() == before
