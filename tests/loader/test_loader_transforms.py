"""The limits of a transform, and the errors beyond them."""

from __future__ import annotations

import functools
import os
import platform
import random
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Json, Schema, ShardLoader, WorkerDied
from shardio.errors import TransformError
from shardio.order.permutation import SampleGenerators
from tests.loading import (
    AT_MOST_ONE_WORKER,
    WORKERS,
    bits,
    check_against,
    make_loader,
    write_dataset,
)
from tests.shards import EVERY_FIELD

N = 40
Sample = dict[str, Any]


def _loader(folder: str, batch_size: int = 8, **options: Any) -> ShardLoader:
    return make_loader(folder, batch_size, **{"output": "numpy", "num_workers": 0, **options})


def _labels(folder: str, transform: Callable[..., Any], **options: Any) -> list[int]:
    with _loader(folder, transform=transform, **options) as loader:
        return [int(label) for batch in loader for label in batch["label"]]


def plus_hundred(sample: Sample) -> Sample:
    return {"label": sample["label"] + 100}


def plus(sample: Sample, rng: np.random.Generator, *, amount: int = 0) -> Sample:
    return {"label": sample["label"] + amount}


class Adder:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, sample: Sample) -> Sample:
        return {"label": sample["label"] + self.amount}

    def add(self, sample: Sample) -> Sample:
        return self(sample)

    def add_with(self, sample: Sample, rng: np.random.Generator) -> Sample:
        return self(sample)


@AT_MOST_ONE_WORKER
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(plus_hundred, id="function"),
        pytest.param(lambda sample: {"label": sample["label"] + 100}, id="lambda"),
        pytest.param(Adder(100), id="callable object"),
        pytest.param(Adder(100).add, id="method"),
        pytest.param(Adder(100).add_with, id="method with rng"),
        pytest.param(functools.partial(plus, amount=100), id="partial with rng"),
        pytest.param(lambda sample, rng=None: plus(sample, rng, amount=100), id="rng by default"),
        pytest.param(lambda sample, amount=100: Adder(amount)(sample), id="another default"),
        pytest.param(lambda *samples: plus_hundred(*samples), id="any arguments"),
        pytest.param(lambda sample: MappingProxyType(plus_hundred(sample)), id="any mapping"),
    ],
)
def test_any_callable_works(folder: str, transform: Callable[..., Any], num_workers: int) -> None:
    found = _labels(folder, transform, num_workers=num_workers)
    assert found == list(range(100, 100 + N))


def test_a_transform_that_cannot_travel_is_refused_by_the_constructor(folder: str) -> None:
    lock = threading.Lock()
    with pytest.raises(shardio.InvalidArgument, match="cannot be sent to worker processes"):
        _loader(folder, num_workers=1, transform=lambda sample: {"label": lock.locked()})


@WORKERS
def test_the_result_decides_the_fields_of_a_batch(every: str, num_workers: int) -> None:
    def describe(sample: Sample) -> Sample:
        return {
            "mean": sample["frames"].mean(axis=0, dtype=np.float32),
            "ratio": 0.25,
            "name": f"n{sample['label']}",
            "raw": bytearray(b"x" * int(sample["label"] % 3)),
            "swapped": np.array([sample["label"], -1], ">i4"),
            "facts": {"label": int(sample["label"]), "list": [1, None]},
            "bits": sample["bits"],
        }

    with _loader(every, N, transform=describe, num_workers=num_workers) as loader:
        (batch,) = loader
        schema = loader._engine.layout().schema
    assert (batch["mean"].dtype, batch["mean"].shape) == (np.float32, (N, 24, 24, 3))
    assert batch["ratio"].tolist() == [0.25] * N
    assert batch["swapped"].dtype.isnative
    assert batch["swapped"].tolist() == [[i, -1] for i in range(N)]
    assert batch["name"] == [f"n{i}" for i in range(N)]
    assert batch["raw"] == [b"x" * (i % 3) for i in range(N)]
    assert batch["facts"] == [{"label": i, "list": [1, None]} for i in range(N)]
    assert schema["bits"] == Array("bfloat16", (3,))


@WORKERS
def test_an_identity_changes_nothing_whatever_the_field(every: str, num_workers: int) -> None:
    samples = list(shardio.open(every))
    with _loader(every, shuffle=True, num_workers=num_workers, transform=dict) as loader:
        for batch in loader:
            assert list(batch) == list(EVERY_FIELD)
            check_against(batch, samples)


@WORKERS
def test_an_identity_leaves_json_of_any_kind_what_it_is(tmp_path: Path, num_workers: int) -> None:
    metas = ["text", 5, None, {"a": 1}, [1, 2], 0.5, True, "", [], {}]
    schema = Schema({"meta": Json()})
    folder = write_dataset(tmp_path / "set", len(metas), 1, schema, [{"meta": m} for m in metas])
    with _loader(folder, num_workers=num_workers, transform=lambda s: s) as loader:
        assert [meta for batch in loader for meta in batch["meta"]] == metas


@WORKERS
def test_fields_limit_what_a_transform_sees(folder: str, num_workers: int) -> None:
    transform = lambda sample: {"names": sorted(sample)}  # noqa: E731
    with _loader(folder, fields=["label"], transform=transform, num_workers=num_workers) as loader:
        assert next(iter(loader))["names"] == [["label"]] * 8


def draw(sample: Sample, rng: np.random.Generator) -> Sample:
    return {
        "label": sample["label"],
        "drawn": np.array([rng.random(), random.random(), np.random.rand()]),
    }


def _draws(folder: str, **options: Any) -> list[dict[int, tuple[float, ...]]]:
    with _loader(folder, transform=draw, shuffle=True, **options) as loader:
        return [
            {
                int(label): tuple(drawn)
                for batch in loader
                for label, drawn in zip(batch["label"], batch["drawn"].tolist(), strict=True)
            }
            for _ in range(2)
        ]


def test_draws_are_the_same_for_every_number_of_workers_and_batch_size(folder: str) -> None:
    expected = _draws(folder)
    for options in ({"num_workers": 1}, {"num_workers": 3}, {"prefetch": 7}, {"reuse": True}):
        assert _draws(folder, **options) == expected
    assert _draws(folder, batch_size=13) == expected


def test_the_generator_given_is_that_of_the_position(folder: str) -> None:
    with _loader(folder, transform=lambda _, rng: {"drawn": rng.random(3)}, seed=9) as loader:
        drawn = np.concatenate([batch["drawn"] for _ in range(2) for batch in loader])
    generators = SampleGenerators(9)
    expected = [generators.at(epoch, i).random(3) for epoch in range(2) for i in range(N)]
    assert np.array_equal(drawn, expected)


def test_draws_differ_by_sample_epoch_seed_and_generator(folder: str) -> None:
    found = [*_draws(folder), *_draws(folder, seed=1)]
    drawn = [value for epoch in found for values in epoch.values() for value in values]
    assert len(set(drawn)) == len(drawn) == 2 * 2 * N * 3


@pytest.mark.parametrize("start_method", ["zygote", "thread"])
@WORKERS
def test_main_generators_stay_unchanged(folder: str, num_workers: int, start_method: str) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "start_method": start_method}
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    for batch_size in (8, 100):
        with _loader(folder, batch_size, transform=draw, **options) as loader:
            for _ in loader:
                assert start_method == "thread" or random.getstate() == states[0]
            with pytest.raises(TransformError):
                list(_loader(folder, transform=_fail_after(20), **options))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]


class OwnError(Exception):
    """Unlike most exceptions, it cannot be made from its args."""

    def __init__(self, what: str, *, where: int) -> None:
        super().__init__(what)
        self.where = where


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _fail_after(n: int) -> Callable[[Sample], Sample]:
    def fail(sample: Sample) -> Sample:
        if sample["label"] >= n:
            raise ValueError(f"label {sample['label']} is too large")
        return sample

    return fail


def _raising(make: Callable[[], BaseException], first: int) -> Callable[[Sample], Sample]:
    def raise_it(sample: Sample) -> Sample:
        if sample["label"] == first:
            raise make()
        return sample

    return raise_it


def _failure(folder: str, transform: Callable[..., Any], **options: Any) -> TransformError:
    """Return the error of the first epoch, after checking that all batches before it arrive."""
    seen: list[int] = []
    with _loader(folder, transform=transform, **options) as loader:
        with pytest.raises(TransformError) as caught:
            for batch in loader:
                seen += batch.indices.tolist()
    assert seen == list(range(len(seen)))
    return caught.value


@WORKERS
@pytest.mark.parametrize("first", [0, 27])
def test_exceptions_carry_traceback_and_sample(folder: str, num_workers: int, first: int) -> None:
    transform = _raising(lambda: ValueError("three is too many"), first)
    error = _failure(folder, transform, num_workers=num_workers)
    shard, row = divmod(first, 20)
    place = f"sample {row} of shard 00000{shard}-000.shard of {folder} (position {first})"
    assert place in str(error)
    assert "the transform raised ValueError: three is too many" in str(error)
    assert "raise make()" in str(error)  # the traceback shows the source
    assert "shardio/_engine" not in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("three is too many",)
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert frames.count(__file__) >= len(frames) - 1  # at most `__iter__` is ours


def test_a_failure_is_told_alike_with_and_without_workers(folder: str) -> None:
    ways: list[Sample] = [{"num_workers": n} for n in (0, 1, 3)]
    ways.append({"num_workers": 2, "start_method": "thread"})
    told = {str(_failure(folder, _fail_after(11), **way)) for way in ways}
    assert len(told) == 1


@AT_MOST_ONE_WORKER
@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: SystemExit(0), "SystemExit: 0", id="SystemExit"),
        pytest.param(lambda: StopIteration("s"), "StopIteration: s", id="StopIteration"),
        pytest.param(lambda: GeneratorExit(), "GeneratorExit", id="GeneratorExit"),
        pytest.param(lambda: MemoryError("m"), "MemoryError: m", id="MemoryError"),
        pytest.param(lambda: OwnError("own", where=3), "OwnError: own", id="unpicklable"),
        pytest.param(lambda: ValueError(threading.Lock()), "ValueError: <", id="holds a lock"),
        pytest.param(lambda: ValueError("\udcff"), "ValueError: ", id="surrogate"),
        pytest.param(lambda: Unspeakable(), "Unspeakable", id="str fails"),
        pytest.param(lambda: ExceptionGroup("g", [ValueError("v")]), "ValueError: v", id="group"),
    ],
)
def test_every_exception_is_a_failure_of_the_transform(
    folder: str, num_workers: int, make: Callable[[], BaseException], words: str
) -> None:
    error = _failure(folder, _raising(make, 13), num_workers=num_workers)
    assert words in str(error)
    assert "sample 13 of shard 000000-000.shard" in str(error)


def test_an_exception_of_a_class_of_the_program_is_of_that_class_in_main(folder: str) -> None:
    class Mine(ValueError):
        pass

    error = _failure(folder, _raising(lambda: Mine("mine"), 3), num_workers=1)
    assert isinstance(error.__cause__, Mine)


MISFITS: dict[str, tuple[Callable[[Sample], Any], str]] = {
    "None": (lambda sample: None, "must be a dict of fields, found NoneType"),
    "several samples": (lambda sample: [sample, sample], "must be a dict of fields, found list"),
    "another field": (lambda sample: {**sample, "more": 1}, "'more'"),
    "a field less": (
        lambda sample: {"label": sample["label"]},
        r"\['image', 'label', 'text'\].*\['label'\]",
    ),
    "float": (lambda sample: {**sample, "label": 1.5}, "int64 of shape .*float64 of shape"),
    "int32": (lambda sample: {**sample, "label": np.int32(1)}, "int64 of shape .*int32 of shape"),
    "smaller": (
        lambda s: {**s, "image": s["image"][:3]},
        r'\(64, 96\).*\(3, 96\); collate="pad", "ragged" or "list"',
    ),
    "more dims": (lambda s: {**s, "image": s["image"][None]}, r"\(64, 96\).*\(1, 64, 96\)"),
    "object": (lambda sample: {**sample, "label": object()}, "'label'.*object"),
    "complex": (lambda sample: {**sample, "label": 1 + 2j}, "'label'.*complex"),
    "uneven list": (lambda sample: {**sample, "label": [[1], [1, 2]]}, "'label'.*list"),
    "array of str": (lambda sample: {**sample, "label": np.array(["a"])}, "'label'.*<U1"),
    "large int": (lambda sample: {**sample, "label": 2**70}, "'label'"),
    "date": (lambda sample: {**sample, "label": np.datetime64("2020")}, "'label'.*datetime64"),
    "key 3": (lambda sample: {**sample, 3: 4}, "3"),
    "set": (lambda sample: {**sample, "label": {1, 2}}, "'label'.*set"),
    "str": (lambda sample: {**sample, "label": "five"}, "'label'.*str"),
    "bytes for str": (lambda sample: {**sample, "text": b""}, "expected str, found bytes"),
    "surrogate": (lambda sample: {**sample, "text": "\ud800"}, "not valid Unicode"),
}


@AT_MOST_ONE_WORKER
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_later_result_unlike_the_first_fails(folder: str, num_workers: int, misfit: str) -> None:
    make, words = MISFITS[misfit]

    def transform(sample: Sample) -> Any:
        sample["text"] = ""
        return make(sample) if sample["label"] == 13 else sample

    error = _failure(folder, transform, num_workers=num_workers)
    assert f"sample 13 of shard 000000-000.shard of {folder}" in str(error)
    assert re.search(words, str(error))


@AT_MOST_ONE_WORKER
@pytest.mark.parametrize(
    "misfit",
    ["None", "several samples", "object", "complex", "array of str", "large int", "date", "set"],
)
def test_an_impossible_first_result_is_named(folder: str, num_workers: int, misfit: str) -> None:
    make, words = MISFITS[misfit]
    error = _failure(folder, make, num_workers=num_workers)
    assert f"sample 0 of shard 000000-000.shard of {folder}" in str(error)
    assert re.search(words, str(error))


def test_images_of_pillow_get_a_hint(folder: str) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")

    def as_pillow(sample: Sample) -> Sample:
        return {**sample, "image": pillow.fromarray(sample["image"])}

    def resized(sample: Sample) -> Sample:
        return {**sample, "image": sample["image"].resize((8, 8))}

    for transform, hint in (
        (as_pillow, "a PIL.Image.Image cannot be .*; return its pixels, numpy.asarray"),
        (resized, r"write PIL\.Image\.fromarray\(x\) .*\.Resize\(\(height, width\)\)"),
    ):
        assert re.search(hint, str(_failure(folder, transform)))


@WORKERS
def test_a_sample_may_be_changed_in_place_but_for_its_arrays(folder: str, num_workers: int) -> None:
    def change(sample: Sample) -> Sample:
        sample["label"] += 1
        sample["image"] = sample["image"].copy()
        sample["image"][0] = 7
        del sample["image"]
        return sample

    assert _labels(folder, change, num_workers=num_workers) == list(range(1, N + 1))
    assert _labels(folder, change, num_workers=num_workers) == list(range(1, N + 1))


def _dying(first: int, end: Callable[[], Any]) -> Callable[[Sample], Sample]:
    def die(sample: Sample) -> Sample:
        if sample["label"] == first:
            end()
        return sample

    return die


ENDS = pytest.mark.parametrize(
    ("end", "words"),
    [
        pytest.param(lambda: os._exit(0), "ended with exit code 0", id="_exit 0"),
        pytest.param(lambda: os._exit(7), "ended with exit code 7", id="_exit 7"),
        pytest.param(lambda: signal.raise_signal(signal.SIGKILL), "killed by signal 9", id="kill"),
        pytest.param(lambda: signal.raise_signal(signal.SIGTERM), "killed by signal 15", id="term"),
        pytest.param(lambda: signal.raise_signal(signal.SIGSEGV), "killed by signal 11", id="segv"),
    ],
)


@ENDS
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("first", [0, 27])
def test_the_death_of_a_worker_is_reported_with_its_sample(
    folder: str, end: Callable[[], Any], words: str, num_workers: int, first: int
) -> None:
    seen: list[int] = []
    with _loader(folder, transform=_dying(first, end), num_workers=num_workers) as loader:
        with pytest.raises(WorkerDied) as caught:
            for batch in loader:
                seen += batch.indices.tolist()
    assert words in str(caught.value)
    shard, row = divmod(first, 20)
    assert f"sample {row} of shard 00000{shard}-000.shard" in str(caught.value)
    if first:
        assert "batch 3 of epoch 0" in str(caught.value)
    assert str(caught.value).endswith(", at which 2 workers have crashed")
    assert seen == list(range(first // 8 * 8))


@ENDS
@pytest.mark.parametrize("first", [0, 27])
def test_a_batch_that_one_worker_died_of_is_done_again_bit_for_bit(
    folder: str, tmp_path: Path, end: Callable[[], Any], words: str, first: int
) -> None:
    marker = tmp_path / words

    def draw(sample: Sample, rng: np.random.Generator) -> Sample:
        if sample["label"] == first and not marker.exists():
            marker.touch()
            end()
        return {**sample, "draw": rng.random(4), "other": np.random.random(2)}

    found = {}
    for num_workers in (2, 1, 0):
        if num_workers:  # a worker is to die; without workers, this process would
            marker.unlink(missing_ok=True)
        with _loader(folder, transform=draw, num_workers=num_workers, shuffle=True) as loader:
            found[num_workers] = [bits(batch) for _ in range(2) for batch in loader]
        assert marker.exists()
    assert found[2] == found[1] == found[0]


def test_without_workers_a_pass_that_was_left_runs_no_further_transform(folder: str) -> None:
    seen: list[int] = []

    def note(sample: Sample) -> Sample:
        seen.append(int(sample["label"]))
        return {"label": sample["label"]}

    with _loader(folder, transform=note) as loader:
        for _ in range(3):
            del seen[:]
            for _ in loader:
                break
            for batch in loader:
                assert batch["label"].tolist() == list(range(8))
                break
            # Twice the first batch; the second of each pass at most is begun ahead of its turn.
            assert seen.count(0) <= 3  # once more for the schema, in the first round
            assert max(seen) < 8


@pytest.mark.parametrize(
    ("taker", "expected"),
    [("transform", [0, *range(N)]), ("batch_transform", [0, *range(0, N, 8)])],
)
def test_functions_run_once(folder: str, tmp_path: Path, taker: str, expected: list[int]) -> None:
    log = tmp_path / "log"

    def note(given: Sample) -> Sample:
        with open(log, "a") as file:
            file.write(f"{np.ravel(given['label'])[0]}\n")
        return {"label": given["label"]}

    for num_workers in (0, 1, 3):
        log.unlink(missing_ok=True)
        options: dict[str, Any] = {taker: note, "num_workers": num_workers}
        with _loader(folder, **options) as loader:
            list(loader)
        assert sorted(map(int, log.read_text().split())) == expected


def test_a_transform_runs_without_tinygrad_and_the_main_module(folder: str) -> None:
    def look(sample: Sample) -> Sample:
        main = sys.modules["__main__"]
        return {"tinygrad": "tinygrad" in sys.modules, "main": str(getattr(main, "__file__", ""))}

    with _loader(folder, transform=look, num_workers=1) as loader:
        batch = next(iter(loader))
    assert not batch["tinygrad"].any()
    assert not any("pytest" in name for name in batch["main"])


def test_same_environ_and_cwd(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDIO_TEST_VALUE", "seen")
    monkeypatch.chdir(tmp_path)

    def look(sample: Sample) -> Sample:
        return {"told": f"{os.environ['SHARDIO_TEST_VALUE']} {os.getcwd()}"}

    with _loader(folder, transform=look, num_workers=1) as loader:
        assert set(next(iter(loader))["told"]) == {f"seen {tmp_path}"}


@WORKERS
def test_errors_have_the_path_as_given(
    folder: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, name = os.path.split(folder)
    monkeypatch.chdir(path)

    def fail(sample: Sample) -> Sample:
        raise ValueError

    for given in (name, f"./{name}/"):
        with (
            _loader(given, transform=fail, num_workers=num_workers) as loader,
            pytest.raises(TransformError, match=rf"\.shard of {re.escape(given)} \("),
        ):
            next(iter(loader))


def test_a_worker_keeps_the_memory_that_a_transform_lets_go_of(folder: str) -> None:
    if platform.libc_ver()[0] != "glibc" or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        pytest.skip("glibc's malloc, with nothing said of it, is what is told to")

    def faults(_: Sample) -> Sample:
        arrays = [np.ones(1 << 20, np.uint8) for _ in range(2)]
        assert arrays[1].all()
        return {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt}

    with ShardLoader(folder, 8, num_workers=1, transform=faults, output="numpy") as loader:
        epochs = [np.concatenate([batch["faults"] for batch in loader]) for _ in range(2)]
    # A sample alone would have hundreds: its arrays are 512 pages.
    assert np.ptp(epochs[1]) < 100
