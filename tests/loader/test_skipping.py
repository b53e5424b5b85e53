"""on_error="skip": a sample that fails costs its row, and nothing else moves."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Schema, ShardLoader, ShardReader, Text, WeightedSampler
from shardio.batch.batch import Batch
from shardio.errors import ChecksumMismatch, ShardChanged, TooManySkipped, TransformError
from tests.loading import (
    TWO_FIELDS,
    WORKERS,
    bits,
    damage_row,
    make_loader,
    two_fields,
    write_dataset,
)
from tests.shards import EVERY_FIELD, flip

N, BATCH = 40, 8
Sample = dict[str, Any]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Copy the dataset with samples 7 and 25 damaged."""
    made = tmp_path_factory.mktemp("skipping") / "damaged"
    path = write_dataset(made, N, 2, TWO_FIELDS, two_fields(N))
    damage_row(path, "image", 7)
    damage_row(path, "image", 5, shard=1)
    return path


def loading(folder: str, batch_size: int = BATCH, **options: Any) -> ShardLoader:
    given = {"output": "numpy", "num_workers": 0, "on_error": "skip", "max_skips": 1000}
    return make_loader(folder, batch_size, **{**given, **options})


def rows_of(batch: Batch) -> list[Any]:
    fields = bits(batch)[4]
    return [
        [(name, values[i], present[i]) for name, values, present in fields]
        for i in range(batch.n_rows)
    ]


def epochs(folder: str, n: int = 2, batch_size: int = BATCH, **options: Any) -> list[Any]:
    with loading(folder, batch_size, **options) as loader:
        return [
            (bits(batch), batch.valid.tolist(), batch.skipped) for _ in range(n) for batch in loader
        ]


def failing(labels: set[int], fail: Callable[[], Any]) -> Callable[..., Sample]:
    """Draws for every sample, but fails for some.

    It travels to workers by value: those that replace dead ones need not import this module.
    """

    def run(sample: Sample, rng: np.random.Generator) -> Sample:
        if int(sample["label"]) in labels:
            fail()
        return {**sample, "draw": rng.random(4), "other": np.random.random(2)}

    return run


def never() -> None:
    raise AssertionError("no sample has been named")


draw = failing(set(), never)


def raising(make: Callable[[], BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise make()

    return fail


# --- what is in a batch ----------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("shuffle", [False, True])
def test_skips_move_nothing(folder: str, damaged: str, num_workers: int, *, shuffle: bool) -> None:
    with loading(folder, shuffle=shuffle) as sound, loading(damaged, shuffle=shuffle) as loader:
        expected = [batch.indices.tolist() for batch in sound]
        batches = list(loader)
    found = []
    for batch, indices in zip(batches, expected, strict=True):
        own = [i for i, is_own in enumerate(batch.valid) if is_own]
        assert [batch.indices[i] for i in own] == [indices[i] for i in own]
        assert [each.row for each in batch.skipped] == np.flatnonzero(~batch.valid).tolist()
        for each in batch.skipped:
            assert each.index == indices[each.row]
            assert each.index not in batch.indices
            found.append((each.index, each.shard, each.sample, each.error))
            assert f"00000{each.shard}-000.shard: the data of a sample does not" in each.text
            assert f"field 'image', sample {each.sample}" in each.text
    assert sorted(found) == [(7, 0, 7, "ChecksumMismatch"), (25, 1, 5, "ChecksumMismatch")]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_substitute_has_the_draws_of_its_own_position(folder: str, *, shuffle: bool) -> None:
    with loading(folder, transform=draw, shuffle=shuffle) as sound:
        expected = {
            int(index): row
            for batch in sound
            for index, row in zip(batch.indices, rows_of(batch), strict=True)
        }
    n_skipped = 0
    transform = failing({0, 3, 4, 5, 31}, raising(lambda: ValueError("no")))
    with loading(folder, transform=transform, shuffle=shuffle) as loader:
        for batch in loader:
            n_skipped += len(batch.skipped)
            for index, row in zip(batch.indices.tolist(), rows_of(batch), strict=True):
                assert row == expected[index]
    assert n_skipped == 5


def test_which_sample_is_the_substitute_depends_on_seed_epoch_and_position(damaged: str) -> None:
    def substitutes(**options: Any) -> list[list[int]]:
        with loading(damaged, fields=["image"], **options) as loader:
            return [[int(b.indices[s.row]) for b in loader for s in b.skipped] for _ in range(3)]

    first = substitutes()
    assert substitutes() == substitutes(batch_size=5) == substitutes(num_workers=2) == first
    assert len({tuple(each) for each in [*first, *substitutes(seed=1)]}) == 6


@pytest.mark.parametrize("with_transform", [False, True])
def test_every_field_of_a_substitute_arrives(tmp_path: Path, *, with_transform: bool) -> None:
    folder = write_dataset(tmp_path / "set", N, 2, EVERY_FIELD)
    number = next(name for name in EVERY_FIELD if name in EVERY_FIELD.columns)
    with loading(folder, fields=list(EVERY_FIELD)) as sound:
        expected = [row for batch in sound for row in rows_of(batch)]
    for row in (0, 3, 13, 14):
        damage_row(folder, number, row)
    transform = dict if with_transform else None
    found = []
    for num_workers in (0, 1):
        with loading(folder, 5, transform=transform, num_workers=num_workers) as loader:
            found.append([bits(batch) for batch in loader])
        with loading(folder, 5, transform=transform, num_workers=num_workers) as loader:
            for batch in loader:
                rows = zip(batch.indices.tolist(), rows_of(batch), strict=True)
                assert all(row == expected[index] for index, row in rows)
    assert found[0] == found[1]


# --- what fails ------------------------------------------------------------------------------


FAILURES = {
    "exception": (raising(lambda: ValueError("no")), "the transform raised ValueError: no"),
    "SystemExit": (raising(lambda: SystemExit(3)), "SystemExit: 3"),
    "StopIteration": (raising(lambda: StopIteration("s")), "StopIteration: s"),
    "GeneratorExit": (raising(lambda: GeneratorExit()), "GeneratorExit"),
    "TransformError": (raising(lambda: TransformError("mine")), "TransformError: mine"),
    "long": (raising(lambda: ValueError("ü" * 3_000_000)), "ValueError: üüü"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_skipped_failures_are_alike_for_any_number_of_workers(folder: str, failure: str) -> None:
    fail, words = FAILURES[failure]
    transform = failing({2, 13, 14, 27}, fail)
    found = epochs(folder, transform=transform, shuffle=True)
    assert found == epochs(folder, transform=transform, shuffle=True, num_workers=2, prefetch=0)
    skipped = [each for _, _, skips in found[: N // BATCH] for each in skips]
    assert sorted(each.index for each in skipped) == [2, 13, 14, 27]
    for each in skipped:
        assert each.error == "TransformError"
        assert words in each.text and len(each.text) < 4100
    assert [valid.count(False) for _, valid, _ in found] == [len(s) for _, _, s in found]


def test_what_does_not_fit_the_first_sample_is_skipped(folder: str) -> None:
    def misfit(sample: Sample) -> Any:
        label = int(sample["label"])
        if label == 9:
            return None
        return {"part": np.zeros(3 if label == 11 else 2), "label": label}

    for num_workers in (0, 1):
        found = epochs(folder, 1, transform=misfit, num_workers=num_workers)
        assert [(each.index, each.error) for _, _, s in found for each in s] == [
            (9, "TransformError"),
            (11, "TransformError"),
        ]


@pytest.mark.parametrize("start_method", ["zygote", "thread"])
def test_keyboard_interrupt_is_skipped_only_in_workers(folder: str, start_method: str) -> None:
    transform = failing({13}, raising(KeyboardInterrupt))
    found = epochs(folder, 1, transform=transform, num_workers=2, start_method=start_method)
    assert [each.index for _, _, skips in found for each in skips] == [13]
    with loading(folder, transform=transform) as loader, pytest.raises(KeyboardInterrupt):
        list(loader)


@WORKERS
def test_running_out_of_memory_is_an_error_also_with_skip(folder: str, num_workers: int) -> None:
    transform = failing({13}, raising(lambda: MemoryError("none left")))
    with (
        loading(folder, transform=transform, num_workers=num_workers) as loader,
        pytest.raises(TransformError, match="MemoryError: none left"),
    ):
        list(loader)


@WORKERS
def test_a_file_cut_short_is_an_error_also_with_skip(tmp_path: Path, num_workers: int) -> None:
    folder = write_dataset(tmp_path / "set", N, 2, TWO_FIELDS, two_fields(N))
    with loading(folder, num_workers=num_workers, access="pread", verify="off") as loader:
        assert len(list(loader)) == N // BATCH
        os.truncate(Path(folder) / "000001-000.shard", 4096)
        with pytest.raises(ShardChanged) as caught:
            list(loader)
        assert caught.value.path == f"{folder}/000001-000.shard"


def failing_reads(place: Path, start: int, stop: int, code: int) -> Callable[..., int]:
    """`os.preadv` of a disk that cannot give some bytes of a file."""
    preadv = os.preadv

    def read(fd: int, views: Any, offset: int, *flags: int) -> int:
        n_bytes = sum(memoryview(view).nbytes for view in views)
        is_bad = os.path.samestat(os.fstat(fd), place.stat())
        if is_bad and offset < stop and start < offset + n_bytes:
            raise OSError(code, os.strerror(code))
        return preadv(fd, views, offset, *flags)

    return read


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_only_lasting_errors_skip(folder: str, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    place = Path(folder) / "000001-000.shard"
    with ShardReader(place) as reader:
        section = reader.column_section("image")
    start = section.offset + 5 * section.stride
    with loading(folder, access="pread", verify="off") as loader:
        monkeypatch.setattr(os, "preadv", failing_reads(place, start + 9, start + 10, code))
        if code != errno.EIO:
            with pytest.raises(OSError, match="Permission denied"):
                list(loader)
            return
        (skipped,) = [each for batch in loader for each in batch.skipped]
    assert (skipped.index, skipped.shard, skipped.sample) == (25, 1, 5)
    assert (skipped.error, str(place) in skipped.text) == ("OSError", True)


# --- workers that die ------------------------------------------------------------------------

ENDS = {
    "exit 0": (lambda: os._exit(0), "ended with exit code 0"),
    "exit 7": (lambda: os._exit(7), "ended with exit code 7"),
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9 (SIGKILL)"),
    "segv": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by signal 11 (SIGSEGV)"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_sample_that_two_workers_died_of_is_skipped(folder: str, end: str) -> None:
    die, words = ENDS[end]
    transform = failing({13, 14}, die)
    found = epochs(folder, 1, transform=transform, num_workers=2, shuffle=True)
    assert found == epochs(folder, 1, transform=transform, num_workers=1, shuffle=True)
    skipped = [each for _, _, skips in found[: N // BATCH] for each in skips]
    assert sorted(each.index for each in skipped) == [13, 14]
    assert {each.error for each in skipped} == {"WorkerDied"}
    assert all(f"2 workers crashed on it alone; the last {words}" == each.text for each in skipped)


def test_a_batch_of_samples_that_all_kill_does_not_end_an_epoch(folder: str) -> None:
    transform = failing(set(range(8, 13)), lambda: os._exit(1))
    found = epochs(folder, 1, transform=transform, num_workers=1)
    assert [len(skips) for _, _, skips in found] == [0, 5, 0, 0, 0]


def kill(pid: int) -> bool:
    """Kill a worker; False where the last kill has ended it and nobody has looked yet."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_is_killed_from_outside_costs_no_sample(folder: str) -> None:
    expected = epochs(folder, 3)
    with loading(folder, num_workers=2) as loader:
        found = []
        for _ in range(3):
            for batch in loader:
                found.append((bits(batch), batch.valid.tolist(), batch.skipped))
                for pid in loader._engine._backend._pool.pids():  # type: ignore[union-attr]
                    if pid is not None and kill(pid):
                        break
    assert found == expected


# --- the first sample ------------------------------------------------------------------------

FIRSTS = {
    "raises": raising(lambda: ValueError("no")),
    "exits": raising(lambda: SystemExit(0)),
    "dies": lambda: os._exit(0),
}


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_bad_first_sample_ends_nothing(folder: str, first: str, num_workers: int) -> None:
    if first == "dies" and not num_workers:
        return  # this process would
    transform = failing({0, 1, 2}, FIRSTS[first])
    found = epochs(folder, 1, transform=transform, num_workers=num_workers)
    assert [each.index for each in found[0][2]] == [0, 1, 2]
    assert sum(len(skips) for _, _, skips in found) == 3


@WORKERS
def test_batches_are_laid_out_though_a_whole_shard_is_bad(folder: str, num_workers: int) -> None:
    transform = failing(set(range(20)), raising(lambda: ValueError("no")))
    found = epochs(folder, 1, transform=transform, num_workers=num_workers)
    assert sum(len(skips) for _, _, skips in found) == 20


@WORKERS
def test_failing_for_all_is_an_error_before_the_first_batch(folder: str, num_workers: int) -> None:
    transform = failing(set(range(N)), raising(lambda: ValueError("no")))
    with loading(folder, transform=transform, num_workers=num_workers) as loader:
        for _ in range(2):
            with pytest.raises(TransformError, match="ValueError: no"):
                iter(loader)


@WORKERS
def test_failing_substitutes_raise_the_samples_own_error(tmp_path: Path, num_workers: int) -> None:
    folder = write_dataset(tmp_path / "set", N, 2, TWO_FIELDS, two_fields(N))
    for row in range(20):
        damage_row(folder, "image", row)
        damage_row(folder, "image", row, shard=1)
    with (
        loading(folder, num_workers=num_workers) as loader,
        pytest.raises(ChecksumMismatch, match="sample 0") as caught,
    ):
        list(loader)
    (note,) = caught.value.__notes__
    assert "32 substitutes drawn for this sample failed, too" in note


# --- how many --------------------------------------------------------------------------------


@WORKERS
def test_exceeding_max_skips_ends_the_epoch(folder: str, num_workers: int) -> None:
    transform = failing({3, 9, 10, 27}, raising(lambda: ValueError("no")))
    options: dict[str, Any] = {"transform": transform, "num_workers": num_workers}
    assert len(epochs(folder, 2, max_skips=4, **options)) == 2 * N // BATCH
    with loading(folder, max_skips=2, **options) as loader:
        for epoch in range(2):  # each counts anew
            steps = iter(loader)
            assert next(steps).step == 0
            with pytest.raises(TooManySkipped) as caught:
                next(steps)
            assert list(steps) == []
            text = str(caught.value)
            assert f"3 samples of epoch {epoch} have failed by batch 1" in text
            assert "max_skips allows 2" in text
            assert "sample 9: TransformError: the transform raised ValueError: no" in text
            assert "sample 10: TransformError" in text
    with loading(folder, max_skips=0, **options) as loader:
        with pytest.raises(TooManySkipped, match="max_skips allows 0") as caught:
            next(iter(loader))
        assert "sample 3: TransformError" in str(caught.value)


@WORKERS
def test_reasons_longer_than_a_message_all_arrive(tmp_path: Path, num_workers: int) -> None:
    folder = write_dataset(tmp_path / "set", 400, 1, TWO_FIELDS, two_fields(400))

    def fail(sample: Sample) -> Sample:
        if sample["label"] % 2:
            raise ValueError(f"{int(sample['label'])} is odd" + "." * 1000)
        return {"label": sample["label"]}

    (found,) = epochs(folder, 1, 400, transform=fail, num_workers=num_workers)
    odd = range(1, 400, 2)
    assert [each.index for each in found[2]] == list(odd)
    for each, number in zip(found[2], odd, strict=True):
        assert f"ValueError: {number} is odd..." in each.text
    assert sum(len(each.text) for each in found[2]) > 200_000


# --- beside other options --------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_padding_is_no_skip_and_ranks_agree_on_substitutes(damaged: str, world_size: int) -> None:
    found = []
    for rank in range(world_size):
        with loading(
            damaged, 7, fields=["image"], tail="pad", rank=rank, world_size=world_size
        ) as loader:
            for batch in loader:
                assert batch.n_rows == 7
                for each in batch.skipped:
                    assert not batch.valid[each.row]
                    found.append((each.index, int(batch.indices[each.row])))
    with loading(damaged, fields=["image"]) as loader:
        expected = [(s.index, int(b.indices[s.row])) for b in loader for s in b.skipped]
    assert sorted(found) == expected


@WORKERS
def test_a_held_batch_keeps_its_reasons_as_does_reuse(damaged: str, num_workers: int) -> None:
    with loading(damaged, num_workers=num_workers) as loader:
        held = [(batch, bits(batch)) for batch in loader]
    assert all(bits(batch) == before for batch, before in held)
    assert [len(batch.skipped) for batch, _ in held] == [1, 0, 0, 1, 0]
    with loading(damaged, num_workers=num_workers, reuse=True) as loader:
        again = [(bits(batch), batch.valid.tolist(), batch.skipped) for batch in loader]
    assert again == [(before, b.valid.tolist(), b.skipped) for b, before in held]


@pytest.mark.parametrize("chosen", ["weights", "sampler", "blocks"])
def test_a_substitute_is_of_the_epochs_own_choice(damaged: str, chosen: str) -> None:
    some = [5, 7, 25, 30, 31, 7]
    choices: dict[str, dict[str, Any]] = {
        "weights": {"sampler": WeightedSampler([float(i in some) for i in range(N)])},
        "sampler": {"sampler": some},
        "blocks": {"shuffle": "blocks"},
    }
    options = choices[chosen]
    found = epochs(damaged, 3, **options)
    assert found == epochs(damaged, 3, num_workers=2, **options)
    skipped = [each.index for _, _, skips in found for each in skips]
    assert set(skipped) == {7, 25}
    for (_, _, indices, _, _), _, _ in found:
        assert not {7, 25} & set(indices)
        assert chosen == "blocks" or set(indices) <= set(some)


# --- batches that are put together in several steps -------------------------------------------

VARYING = Schema({"points": Array("float32", (None, 2)), "label": Array("int64"), "note": Text()})


@pytest.fixture(scope="module")
def varying(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write a dataset, and a copy with one bit flipped in the points of sample 8."""
    root = tmp_path_factory.mktemp("skipping")
    for name in ("sound", "damaged"):
        points = (np.full((i % 5, 2), i, np.float32) for i in range(N))
        samples = ({"points": p, "label": i, "note": f"note {i}"} for i, p in enumerate(points))
        write_dataset(root / name, N, 1, VARYING, samples)
    (shard,) = (root / "damaged").glob("*.shard")
    flip(shard, shard.read_bytes().index(np.full((3, 2), 8, np.float32).tobytes()))
    return str(root / "sound"), str(root / "damaged")


def double(batch: Sample) -> Sample:
    return {**batch, "label": batch["label"] * 2}


def collate(samples: list[Sample]) -> Sample:
    return {"total": np.array([each["points"].sum() for each in samples]), "label": [*range(4)]}


COLLATED: dict[str, dict[str, Any]] = {
    "pad": {"collate": "pad"},
    "ragged": {"collate": "ragged"},
    "list": {"collate": "list"},
    "batch_transform": {"collate": "list", "batch_transform": double},
    "padded, batch_transform": {"collate": "pad", "batch_transform": double},
    "function": {"collate": collate},
}


@pytest.mark.parametrize("how", COLLATED)
def test_a_failing_transform_costs_a_row_when_collated(varying: tuple[str, str], how: str) -> None:
    transform = failing({0, 7, 21}, raising(lambda: ValueError("bad")))
    options: dict[str, Any] = COLLATED[how] | {"transform": transform, "shuffle": True}
    found = epochs(varying[0], 2, 4, **options)
    skipped = sorted(each.index for _, _, skips in found for each in skips)
    assert skipped == [0, 0, 7, 7, 21, 21]
    assert not {0, 7, 21} & {i for (_, _, indices, *_), _, _ in found for i in indices}
    assert sum(valid.count(False) for _, valid, _ in found) == len(skipped)
    assert epochs(varying[0], 2, 4, **options, num_workers=2) == found


@pytest.mark.parametrize("how", COLLATED)
def test_a_damaged_sample_costs_a_row_when_collated(varying: tuple[str, str], how: str) -> None:
    found = epochs(varying[1], 2, 4, **COLLATED[how], shuffle=True)
    errors = [(each.index, each.error) for _, _, skips in found for each in skips]
    assert errors == [(8, "ChecksumMismatch")] * 2
    assert epochs(varying[1], 2, 4, **COLLATED[how], shuffle=True, num_workers=2) == found


@pytest.mark.parametrize("shuffle", [False, True, "blocks"])
def test_batches_are_laid_out_by_the_first_sound_sample(folder: str, shuffle: Any) -> None:
    given: list[list[int]] = []

    def keep(batch: Sample) -> Sample:
        given.append(batch["label"].tolist())
        return batch

    transform = failing({*range(5)}, raising(lambda: ValueError("bad")))
    epochs(folder, 1, 4, shuffle=shuffle, transform=transform, batch_transform=keep)
    assert given[0] == [5, 5, 5, 5]


@WORKERS
def test_what_fails_of_a_whole_batch_is_raised(folder: str, num_workers: int) -> None:
    def fail_of_all(batch: Sample) -> Sample:
        if 21 in batch["label"]:
            raise ValueError("no single sample's fault")
        return batch

    with pytest.raises(TransformError, match="no single sample's fault"):
        epochs(folder, 1, batch_transform=fail_of_all, num_workers=num_workers)
