"""Convert blocks to tinygrad tensors; no other package imports tinygrad.

On the CPU device a tensor shares the block's memory; on other devices it is a copy. `internals` has
fast paths through internals of tinygrad; `adapter` falls back to the public API if they change.
"""
