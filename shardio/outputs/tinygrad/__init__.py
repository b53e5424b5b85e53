"""Tensors over the blocks that batches arrive in; nothing outside of this folder imports tinygrad.

On the CPU device a tensor *is* the block's memory (`views`); other devices get a copy (`copies`).
`maker` chooses. What waits until the devices have read it is in `waiting`. All but maker take
internals of tinygrad, and have a public way to fall back on, in case those have `changed`; the
graphs of tensors are made in one place (`graphs`).

`pictures` is for users: what they do to batches in their own step.
"""
