"""Uploads that run while the loop continues; a device that copies late stands for a GPU."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardio import ShardLoader
from shardio.outputs.torch import CudaUploads
from tests.loading import TWO_FIELDS, WORKERS, write_dataset

pytestmark = pytest.mark.usefixtures("warm_zygote")

N, BATCH, EPOCHS = 22, 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = ({"image": np.full((64, 96), i, np.uint8), "label": i} for i in range(N))
    return write_dataset(tmp_path_factory.mktemp("late") / "set", N, 2, TWO_FIELDS, samples)


class LateDevice:
    """An adapter whose copies are made at the last moment at which this is allowed.

    It does not keep the arrays' memory alive.
    """

    aliases, wraps_items = False, True

    def __init__(self) -> None:
        self.n_pinned = self.n_pins = 0
        self._queued: list[Callable[[], None]] = []

    @property
    def uploads(self) -> Any:
        return self

    def wrap(self, array: Any, owner: object, dtype: str | None = None) -> Any:
        content = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
        made = np.zeros_like(array)
        shape, kind = array.shape, array.dtype
        self._queued.append(lambda: np.copyto(made, np.ndarray(shape, kind, content)))
        return made

    def make_copier(self, array: Any, dtype: str | None = None) -> Callable[[Any], Any]:
        return lambda values: self.wrap(values, None)

    def synchronize(self) -> None:
        while self._queued:
            self._queued.pop()()

    def begin_batch(self) -> None:
        pass

    def pin(self, memory: Any) -> Callable[[], None]:
        self.n_pins, self.n_pinned = self.n_pins + 1, self.n_pinned + 1

        def unpin() -> None:
            self.synchronize()
            self.n_pinned -= 1

        return unpin


@WORKERS
@pytest.mark.parametrize("lane", [{}, {"reuse": True}], ids=["leased", "reuse"])
def test_a_block_changes_only_after_its_uploads(
    folder: str, num_workers: int, lane: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"num_workers": num_workers, "shuffle": True, "prefetch": 0}
    with ShardLoader(folder, BATCH, output="numpy", **options) as loader:
        expected = [dict(batch) for _ in range(EPOCHS) for batch in loader]
    device = LateDevice()
    monkeypatch.setattr("shardio.loader.create_adapter", lambda *_: device)
    with ShardLoader(folder, BATCH, output="torch", **options, **lane) as loader:
        made = []
        for _ in range(EPOCHS):
            for batch in loader:
                made.append({name: batch[name] for name in batch})
                del batch
        n_blocks = len(loader._engine.pool)
    assert (device.n_pins, device.n_pinned) == (n_blocks, 0)
    for found, arrays in zip(made, expected, strict=True):
        for name in arrays:
            np.testing.assert_array_equal(found[name], arrays[name])


@WORKERS
def test_a_loader_closed_within_an_epoch_has_made_all_uploads(
    folder: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    monkeypatch.setattr("shardio.loader.create_adapter", lambda *_: device)
    with ShardLoader(folder, BATCH, output="torch", num_workers=num_workers) as loader:
        batches = iter(loader)
        labels = [next(batches)["label"] for _ in range(2)]
    assert device.n_pinned == 0
    assert np.concatenate(labels).tolist() == list(range(2 * BATCH))


class FakeCuda:
    """Stands for torch on a GPU: it notes the calls that order streams, and refuses to pin."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.pinned: list[int] = []
        self._n_events, self._error = 0, 2 if refuses else 0
        self.cuda = self
        side = SimpleNamespace(
            device="cuda:0",
            wait_event=lambda event: self.calls.append(f"uploads wait for {event}"),
            synchronize=lambda: self.calls.append("wait"),
        )
        self.Stream = lambda _: side

    def current_stream(self, _: object) -> Any:
        return SimpleNamespace(record_event=self._record)

    def _record(self) -> str:
        self._n_events += 1
        return f"event {self._n_events}"

    def device(self, _: object) -> Any:
        return warnings.catch_warnings()  # a context manager that does nothing here

    def ones(self, *_: object, **__: object) -> None:
        raise RuntimeError("the error of the last call")

    def cudart(self) -> Any:
        def register(address: int, *_: int) -> int:
            self.calls.append("register")
            if not self._error:
                self.pinned.append(address)
            return self._error

        return SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=self.pinned.remove,
            cudaGetErrorString=lambda _: "out of memory",
            cudaError=int,
        )


def test_uploads_wait_for_the_work_on_all_batches_but_the_last() -> None:
    torch = FakeCuda()
    uploads = CudaUploads(torch, "cuda")
    for _ in range(3):
        uploads.begin_batch()
    assert torch.calls == ["uploads wait for event 1", "uploads wait for event 2"]


def test_memory_is_unpinned_after_all_uploads() -> None:
    torch, memory = FakeCuda(), np.zeros(64, np.uint8)
    unpin = CudaUploads(torch, "cuda").pin(memory)
    assert torch.pinned == [memory.ctypes.data]
    unpin()
    assert (torch.pinned, torch.calls) == ([], ["register", "wait"])


def test_a_driver_that_refuses_to_pin_is_asked_once() -> None:
    torch = FakeCuda(refuses=True)
    uploads = CudaUploads(torch, "cuda")
    expected = (
        r"pinned for cuda:0 \(cudaHostRegister of 64 bytes: out of memory\).*lower memory_bytes"
    )
    with pytest.warns(RuntimeWarning, match=expected):
        uploads.pin(np.zeros(64, np.uint8))()
    uploads.pin(np.zeros(64, np.uint8))()
    assert torch.calls == ["register"]
