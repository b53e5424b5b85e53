"""Convert blocks to tinygrad tensors; no other package imports tinygrad.

On the CPU device a tensor shares the block's memory; other devices get a copy. `adapter` chooses.
`internals` uses internals of tinygrad, each with a public fallback in case they change.
"""
