"""Tensors over the blocks that batches arrive in; nothing outside of this folder imports tinygrad.

On the CPU device a tensor *is* the block's memory (`views`); other devices get a copy (`maker`).
What waits until the devices have read it is in `waiting`. Where views and waiting take internals of
tinygrad, they have a public way to fall back on, in case those have `changed`.
"""

from shardio.tensors.maker import TensorMaker

__all__ = ["TensorMaker"]
