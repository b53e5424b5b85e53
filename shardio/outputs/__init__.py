"""Loader outputs: NumPy arrays, or tensors of tinygrad, torch or JAX, imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardio.outputs.tinygrad.adapter import yuv420_to_rgb

__all__ = ["yuv420_to_rgb"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562): it imports tinygrad."""
    if name not in __all__:
        raise AttributeError(f"module 'shardio.outputs' has no attribute {name!r}")
    from shardio.outputs.tinygrad.adapter import yuv420_to_rgb

    return yuv420_to_rgb
