"""Batches on a GPU equal those of output="numpy"; each framework that sees no GPU is skipped."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, List, Schema, ShardLoader, Text
from shardio.errors import ShardioError
from shardio.outputs import create_adapter
from tests.loading import write_dataset

pytestmark = [pytest.mark.external, pytest.mark.process]

# Otherwise JAX takes most of the device's memory, of which torch and tinygrad need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

N, BATCH, EPOCHS = 44, 8, 2
DEVICES = {"torch": "cuda", "jax": "gpu", "tinygrad": "CUDA"}
SCHEMA = Schema(
    {
        "image": Array("uint8", (240, 320, 3)),
        "x": Array("float32", (5, 3)),
        "label": Array("int32"),
        "run": Array("int16", (None,)),
        "parts": List(Array("int32", (None,))),
        "note": Text(),
    }
)
Values = dict[str, Any]


def _sample(i: int) -> Values:
    rng = np.random.default_rng(i)
    return {
        "image": rng.integers(0, 256, (240, 320, 3), np.uint8),
        "x": rng.random((5, 3), np.float32),
        "label": i,
        "run": np.arange(1 + i * 1000, dtype=np.int16),  # later samples are longer: blocks grow
        "parts": [np.full(k + 1, i, np.int32) for k in range(1 + i % 3)],
        "note": f"note {i}",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = (_sample(i) for i in range(N))
    return write_dataset(tmp_path_factory.mktemp("gpu") / "set", N, 3, SCHEMA, samples)


class Gpu:
    """A framework and its GPU; `slow_sum` queues work that reads a tensor late."""

    def __init__(self, output: str) -> None:
        self.output, self.device = output, DEVICES[output]
        try:
            create_adapter(output, self.device)
        except ShardioError as error:
            pytest.skip(f"{output} sees no GPU: {error}")
        self.slow_sum: Callable[[Any], Any] = getattr(self, f"_{output}_sum")()

    def loader(self, folder: str, **options: Any) -> ShardLoader:
        return _loader(folder, output=self.output, device=self.device, **options)

    def _torch_sum(self) -> Callable[[Any], Any]:
        import torch

        def queue(x: Any) -> Any:
            torch.cuda._sleep(4_000_000)  # about 2 ms
            return x.long().sum()

        return queue

    def _jax_sum(self) -> Callable[[Any], Any]:
        import jax

        def work(x: Any) -> Any:
            slow = jax.lax.fori_loop(0, 40, lambda _, m: m @ m / 2048, jax.numpy.ones((2048, 2048)))
            return x.astype("int32").sum() + (slow[0, 0] > 2).astype("int32")

        return jax.jit(work)  # type: ignore[no-any-return]

    def _tinygrad_sum(self) -> Callable[[Any], Any]:
        from tinygrad.dtype import dtypes
        from tinygrad.tensor import Tensor

        ones = Tensor.ones(2048, 2048, device=self.device).contiguous().realize()

        def queue(x: Any) -> Any:
            slow = (ones @ ones)[0, 0].cast(dtypes.int) - 2048
            return (slow + x.cast(dtypes.int).sum()).realize()

        return queue


@pytest.fixture(params=DEVICES)
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    pytest.importorskip(request.param, reason=f"needs {request.param}")
    yield Gpu(request.param)
    if request.param == "tinygrad":  # its own context stays current, in which torch does not work
        from tinygrad.runtime.autogen import cuda

        cuda.cuCtxSetCurrent(None)


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch", reason="needs torch, which the extra dev does without")
    if not found.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return found


def _loader(folder: str, **options: Any) -> ShardLoader:
    return ShardLoader(folder, BATCH, **{"num_workers": 0, "shuffle": True, "seed": 3, **options})


def _numpy(value: Any) -> Any:
    if isinstance(value, list):
        return [_numpy(each) for each in value]
    if isinstance(value, str):
        return value
    if type(value).__module__.startswith("tinygrad"):
        return value.numpy()
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)


def _same(one: Any, two: Any) -> bool:
    if isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(np.array_equal(one, two)) if isinstance(two, np.ndarray) else one == two


def _assert_same(batch: Mapping[str, Any], expected: Values) -> None:
    assert {name: _same(_numpy(batch[name]), expected[name]) for name in batch} == dict.fromkeys(
        expected, True
    )


@pytest.fixture(scope="module")
def expected(folder: str) -> list[Values]:
    """Return the batches of all epochs, as NumPy arrays."""
    with _loader(folder, output="numpy") as loader:
        return [dict(batch) for _ in range(EPOCHS) for batch in loader]


WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
LANES = pytest.mark.parametrize("lane", [{}, {"reuse": True}], ids=["leased", "reuse"])


def _pids(loader: ShardLoader) -> list[int]:
    backend: Any = loader._engine._backend
    return list(backend._pool.pids())


def _epochs(loader: ShardLoader) -> Iterator[Any]:
    return itertools.chain.from_iterable(loader for _ in range(EPOCHS))


@WORKERS
@LANES
def test_batches_are_equal(
    gpu: Gpu, folder: str, expected: list[Values], num_workers: int, lane: Values
) -> None:
    with gpu.loader(folder, num_workers=num_workers, **lane) as loader:
        for batch, arrays in zip(_epochs(loader), expected, strict=True):
            _assert_same(batch, arrays)


@pytest.mark.parametrize("rule", ["pad", "ragged"])
def test_joined_arrays_are_equal(gpu: Gpu, folder: str, rule: str) -> None:
    options = {"fields": ["image", "run"], "collate": {"run": rule}, "num_workers": 2}
    with (
        gpu.loader(folder, **options) as loader,
        _loader(folder, output="numpy", **options) as other,
    ):
        for batch, arrays in zip(loader, other, strict=True):
            _assert_same(batch, dict(arrays))


@WORKERS
@LANES
def test_slow_queued_steps_read_their_own_batch(
    gpu: Gpu, folder: str, expected: list[Values], num_workers: int, lane: Values
) -> None:
    fields = ["image", "run"]
    with gpu.loader(folder, num_workers=num_workers, **lane, fields=fields) as loader:
        sums = [
            (gpu.slow_sum(batch["image"]), gpu.slow_sum(batch["run"][0]))
            for batch in _epochs(loader)
        ]
    for (images, run), arrays in zip(sums, expected, strict=True):
        assert int(_numpy(images)) == arrays["image"].sum(dtype=np.int64)
        assert int(_numpy(run)) == arrays["run"][0].sum(dtype=np.int64)


@WORKERS
def test_held_batches_keep_their_values(
    gpu: Gpu, folder: str, expected: list[Values], num_workers: int
) -> None:
    with gpu.loader(folder, num_workers=num_workers, prefetch=0) as loader:
        held = list(_epochs(loader))
    for batch, arrays in zip(held, expected, strict=True):
        _assert_same(batch, arrays)


@LANES
def test_a_killed_worker_changes_no_batch(
    gpu: Gpu, folder: str, expected: list[Values], lane: Values
) -> None:
    with gpu.loader(folder, num_workers=2, **lane) as loader:
        for i, (batch, arrays) in enumerate(zip(_epochs(loader), expected, strict=True)):
            if i == 2:
                os.kill(_pids(loader)[0], signal.SIGKILL)
            _assert_same(batch, arrays)


@LANES
def test_loaders_closed_within_an_epoch_one_after_another(
    gpu: Gpu, folder: str, expected: list[Values], lane: Values
) -> None:
    held = []
    for k in range(1, 6):  # the blocks of later ones are mapped at the addresses of earlier ones
        loader = gpu.loader(folder, num_workers=2 * (k % 2), **lane)
        for batch, arrays in itertools.islice(zip(loader, expected, strict=False), k):
            _assert_same(batch, arrays)
            held.append((batch["image"], arrays["image"]))
        loader.close()
        assert np.array_equal(_numpy(held[-1][0]), held[-1][1])
    if not lane:
        assert all(np.array_equal(_numpy(image), array) for image, array in held)


@LANES
def test_a_resumed_epoch_goes_on_with_equal_batches(
    gpu: Gpu, folder: str, expected: list[Values], lane: Values
) -> None:
    with gpu.loader(folder, num_workers=2, **lane) as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        state = loader.state_dict()
    with gpu.loader(folder, num_workers=2, **lane) as loader:
        loader.load_state_dict(state)
        for batch, arrays in zip(loader, expected[2 : len(loader)], strict=True):
            _assert_same(batch, arrays)


# torch: pinned blocks, and a stream for uploads.


def _is_pinned(torch: Any, memory: Any) -> bool:
    return bool(torch.from_numpy(memory).is_pinned())


def test_blocks_are_pinned_until_the_loader_is_closed(torch: Any, folder: str) -> None:
    with _loader(folder, output="torch", device="cuda", num_workers=2) as loader:
        for batch in loader:
            assert _is_pinned(torch, batch._block)
        pool = loader._engine.pool
        memory = [pool[i].bytes for i in range(len(pool))]
    assert not any(_is_pinned(torch, each) for each in memory)
    with _loader(folder, output="torch", num_workers=0) as loader:
        assert not _is_pinned(torch, next(iter(loader))._block)


def test_blocks_that_cannot_be_pinned_are_uploaded(
    torch: Any, folder: str, expected: list[Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = torch.cuda.cudart()

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def cudaHostRegister(self, *_: int) -> Any:
            return runtime.cudaHostRegister(8, 4096, 0)  # an address that is not mapped

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with _loader(folder, output="torch", device="cuda", num_workers=2) as loader:
        batches = _epochs(loader)
        with pytest.warns(
            RuntimeWarning, match=r"cannot be pinned for cuda:0 .*lower memory_bytes"
        ) as said:
            first = next(batches)
        assert len(said) == 1
        torch.ones(2, device="cuda").add_(1)  # the failed call has left no error behind
        for batch, arrays in zip(itertools.chain([first], batches), expected, strict=True):
            _assert_same(batch, arrays)


@LANES
def test_a_loop_may_run_on_a_stream_of_its_own(
    torch: Any, folder: str, expected: list[Values], lane: Values
) -> None:
    options = {"output": "torch", "device": "cuda", "num_workers": 2, **lane}
    with _loader(folder, fields=["image"], **options) as loader:
        with torch.cuda.stream(torch.cuda.Stream()):
            slow_sum, sums = Gpu("torch").slow_sum, []
            for batch in _epochs(loader):
                sums.append(slow_sum(batch["image"]))
            found = [int(each) for each in sums]
    assert found == [int(arrays["image"].sum(dtype=np.int64)) for arrays in expected]


def test_a_captured_graph_reads_reused_tensors(
    torch: Any, folder: str, expected: list[Values]
) -> None:
    options = {"output": "torch", "device": "cuda", "reuse": True, "tail": "drop"}
    with _loader(folder, fields=["image"], num_workers=2, **options) as loader:
        image = next(iter(loader))["image"]
        image.long().sum()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = image.long().sum()
        found = []
        for batch in loader:
            assert batch["image"] is image
            graph.replay()
            found.append(result.clone())
    second = [each for each in expected[N // BATCH + 1 :] if len(each["image"]) == BATCH]
    assert [int(each) for each in found] == [int(each["image"].sum(dtype="i8")) for each in second]


def test_the_loader_goes_on_after_the_device_was_out_of_memory(
    torch: Any, folder: str, expected: list[Values]
) -> None:
    with _loader(folder, output="torch", device="cuda", num_workers=2) as loader:
        next(iter(loader))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-9)
        try:
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                next(iter(loader))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        loader.load_state_dict(loader.state_dict())
        for batch, arrays in zip(loader, expected[len(loader) :], strict=True):
            _assert_same(batch, arrays)


def test_a_pinned_loader_and_workers_leave_the_device_to_this_process(
    torch: Any, folder: str
) -> None:
    with _loader(folder, output="torch", device="cuda", num_workers=2) as loader:
        next(iter(loader))
        for pid in _pids(loader):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "libcuda" not in maps and "/dev/nvidia" not in maps
