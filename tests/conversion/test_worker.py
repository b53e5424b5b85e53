"""The work of one process: samples spilled to a file come back unchanged, endless steps end."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Input
from shardio._workers.processes import zygote
from shardio.conversion import worker
from shardio.conversion.converter import make_converter
from shardio.conversion.scheduler import shared_modules
from shardio.conversion.worker import ConversionJob, SampleBuffer, cpu_limit_s, limit_cpu

KINDS: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i,
    "float64": np.float64,
    "int8": lambda i: np.int8(i % 100),
    "big_endian": lambda i: np.full((2, 3), i, ">i4"),
    "bool": lambda i: np.bool_(i % 2),
    "str": str,
    "numpy_str": lambda i: np.str_(i),
    "bytes": lambda i: b"a" * i,
    "rows": lambda i: np.full((3, 2), i, np.float32),
    "varying": lambda i: np.zeros(i, np.int16),
    "zero_dim": lambda i: np.array(i, np.int32),
    "masked": lambda i: np.ma.masked_array([i, 1], [True, False]),
    "objects": lambda i: np.array([i, None]),
    "mixed": lambda i: [i, np.int64(i), None][i % 3],
    "dtypes": lambda i: np.full(2, i % 100, np.int8 if i % 2 else np.int16),
}


def comparable(value: Any) -> Any:
    """Return everything by which a value can be compared."""
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, repr(value)
    return type(value), value


@pytest.mark.parametrize("kind", KINDS)
def test_spilling_keeps_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    given = [{"x": KINDS[kind](i), "text": f"{i}"} for i in range(300)]
    monkeypatch.setattr(worker, "BUFFER_BYTES", 1_000)
    with SampleBuffer(str(tmp_path)) as buffer:
        for sample in given:
            buffer.append(sample)
        found = list(buffer)
        assert buffer.n_samples == 300
    assert [[comparable(v) for v in one.values()] for one in found] == [
        [comparable(v) for v in one.values()] for one in given
    ]


def test_samples_of_other_fields_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [{"x": i} if i % 3 else {"y": i, "x": 1} if i % 2 else {} for i in range(300)]
    monkeypatch.setattr(worker, "BUFFER_BYTES", 1_500)
    with SampleBuffer(str(tmp_path)) as buffer:
        for sample in given:
            buffer.append(sample)
        assert list(buffer) == given


@pytest.mark.parametrize(
    "sample",
    [
        {"x": np.float64(1), "y": np.int8(1)},
        {"x": [1.5, {"y": 2.5}, None]},
        {"x": np.zeros(2, np.uint8), "y": np.zeros((9, 2))[1:]},
    ],
    ids=["numbers", "nested", "arrays"],
)
def test_buffers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: dict[str, Any]
) -> None:
    monkeypatch.setattr(worker, "BUFFER_BYTES", 1 << 17)
    with SampleBuffer(str(tmp_path)) as buffer:
        tracemalloc.start()
        try:
            for _ in range(4_000):
                buffer.append(copy.deepcopy(sample))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 3 << 17


def left_s() -> float:
    return signal.getitimer(signal.ITIMER_PROF)[0]


def samples(n: int) -> Generator[dict[str, Any], None, str]:
    for number in range(n):
        assert left_s() > 1000
        yield {"n": number}
    return "done"


def test_samples_and_outcome_are_unchanged_and_each_step_has_its_own_limit() -> None:
    made = limit_cpu(samples(3), 2000)
    found = []
    while True:
        try:
            found.append(next(made))
        except StopIteration as end:
            assert end.value == "done"
            break
        assert left_s() > 1000
    assert found == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert left_s() == 0


@pytest.mark.parametrize("n_steps", [0, 1])
def test_the_limit_ends_with_the_samples(n_steps: int) -> None:
    made = limit_cpu(samples(2), 2000)
    for _ in range(n_steps):
        next(made)
    made.close()
    assert left_s() == 0


def test_large_inputs_have_a_higher_limit() -> None:
    part = Input("b", "b", 3 << 20, -1)
    assert cpu_limit_s(60, Input("a", "a", 5 << 20, -1, parts=(part,))) == 68


def test_modules_that_workers_share_start_no_thread(tmp_path: Path) -> None:
    modules: set[str] = set()
    for kind in ("videos", "images", "arrays"):
        job = ConversionJob(make_converter(kind, {}), str(tmp_path), 1, False, False)
        modules |= {*shared_modules(job)}
    assert modules == {"av", "PIL.Image", "simplejpeg"}
    code = f"import os, {', '.join(sorted(modules))}; print(len(os.listdir('/proc/self/task')))"
    one_thread = os.environ | dict.fromkeys(zygote.SINGLE_THREAD, "1")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
