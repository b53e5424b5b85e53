"""Copy tensors to a CUDA device while the device computes.

`tensor.to("cuda")` lets the program wait until the device has done all queued work: the copy joins
the queue of the current stream. Here, copies have a *stream of their own*, on which they run beside
that work. They read blocks that are *pinned*: the kernel may not move their pages, so that the
device reads them by itself. The program does not wait for such a copy; the current stream does.

Copies must not get far ahead of the computation, because each one takes memory of the device. They
are held back by events: the copies of batch n begin when the work on batch n - 2 is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio._base.callers import warn


class CudaUploads:
    """Copies of CPU tensors on a CUDA device, for the stream that is current at the call."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream(device)
        self._device = self._stream.device  # "cuda" alone is the current device
        self._last_handed: Any = None
        """An event on the current stream: the work on all batches before the last one is done."""
        self._can_pin = True

    def begin_batch(self) -> None:
        """Let the copies of the next batch wait for the work on all batches but the last one."""
        if self._last_handed is not None:
            self._stream.wait_event(self._last_handed)
        self._last_handed = self._torch.cuda.current_stream(self._device).record_event()

    def copy(self, tensor: Any) -> Any:
        """Return a copy of a CPU tensor on the device.

        If the tensor's memory is pinned, it may be read until `wait` is called.
        """
        cuda, stream = self._torch.cuda, self._stream
        current = cuda.current_stream(self._device)
        with cuda.stream(stream):
            copied = tensor.to(self._device, non_blocking=tensor.is_pinned())
        current.wait_stream(stream)
        # The memory belongs to `stream`: it must not be used for another copy before the work that
        # is queued on the current stream when the program releases the tensor.
        copied.record_stream(current)
        return copied

    def wait(self) -> None:
        """Wait until all copies have been made."""
        self._stream.synchronize()

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Pin memory, which must be unpinned before it is unmapped; return `unpin`.

        If the driver refuses, warn once, and leave this and later memory as it is. Copies from it
        are correct, but slower, and the program waits for them.
        """
        if not self._can_pin:
            return _do_nothing
        runtime, address = self._torch.cuda.cudart(), memory.ctypes.data
        with self._torch.cuda.device(self._device):
            error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
        if error:
            self._can_pin = False
            self._clear_error()
            self._warn(runtime.cudaGetErrorString(runtime.cudaError(error)), memory.nbytes)
            return _do_nothing

        def unpin() -> None:
            # After an error of the device, every call of CUDA fails; closing must not.
            with contextlib.suppress(RuntimeError):
                self.wait()
                runtime.cudaHostUnregister(address)

        return unpin

    def _clear_error(self) -> None:
        """Consume the error of a failed call; CUDA would report it to the next launch of a kernel.

        Nothing else in torch calls cudaGetLastError.
        """
        with contextlib.suppress(RuntimeError):
            self._torch.ones(1, device=self._device)

    def _warn(self, reason: str, n_bytes: int) -> None:
        warn(
            f"the memory of batches cannot be pinned for {self._device} (cudaHostRegister of "
            f"{n_bytes} bytes: {reason}), so uploads are slower, and the program waits for them: "
            "lower memory_bytes or prefetch",
            RuntimeWarning,
        )


def _do_nothing() -> None:
    """Stand for `unpin` of memory that is not pinned."""
