"""Tensors over buffers of our own making: the graph is kept, and only the buffer under it is new.

tinygrad builds and checks the same small graph for every tensor of a shape and dtype, which costs
several times what is needed, and to fill it by a copy costs a schedule. So the graph is kept, per
shape and dtype, over a buffer without memory, so that nothing stays alive with it. That takes
internals of tinygrad: whoever uses it tries it out first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from tinygrad.dtype import DType
from tinygrad.tensor import Tensor


class _Template(NamedTuple):
    """The graph of every tensor of one shape and dtype, over a buffer without memory.

    `wrapping` is what makes the graph's topmost node of its sources, None where that is the buffer;
    `leaf` is the buffer's node, and `number` makes its argument of a number, where it has one.
    """

    tensor: Tensor
    leaf: Any
    number: Callable[..., Any] | None
    wrapping: tuple[Any, ...] | None


class Graphs:
    """Makes tensors over buffers of one device."""

    # As many shapes as a loop may have batches of at a time; varying shapes must not pile up.
    MOST_TEMPLATES = 256

    def __init__(self, device: str) -> None:
        # Here, because these names may go with any version of tinygrad.
        from tinygrad.device import Buffer, BufferSpec
        from tinygrad.uop.ops import UOp, buffers

        self._device = device
        self.Buffer, self.BufferSpec = Buffer, BufferSpec
        self._uop, self._buffers = UOp, buffers
        self._templates: dict[tuple[tuple[int, ...], DType], _Template] = {}
        # Without the wrapper that notes, at half of the cost, which method made a node.
        derive: Any = Tensor._apply_uop
        self._derive: Callable[..., Tensor] = getattr(derive, "__wrapped__", derive)

    def tensor(self, shape: tuple[int, ...], dtype: DType, buffer: Any) -> Tensor:
        """Make a tensor over a buffer of as many elements, which it owns."""
        template, leaf, number, wrapping = self._template(shape, dtype)
        fresh = self._fresh(leaf, number)
        self._buffers[fresh] = buffer.ref(1)  # this is what owns the Buffer: it goes with `fresh`
        if wrapping is None:
            return self._derive(template, lambda _: fresh)
        op, kind, sources, argument, tag = wrapping
        uop: Any = self._uop
        return self._derive(template, lambda _: uop(op, kind, (fresh, *sources), argument, tag))

    def _fresh(self, leaf: Any, number: Callable[..., Any] | None) -> Any:
        """Copy a buffer's node under a number that no node ever had.

        tinygrad's own `UOp.from_buffer` takes the address of the Buffer object for a number, and
        that comes again: safe while each node's end comes first, but nothing is won by relying on
        it. tinygrad keeps one node per number and finds the memory by the node.
        """
        uop: Any = self._uop
        if number is not None:  # tinygrad 0.14; `new_buffer` is slower
            argument = number(slot=next(uop.unique_num))
            return uop(leaf.op, leaf.dtype, leaf.src, argument, leaf.tag)
        return uop.new_buffer(self._device, leaf.arg, leaf.dtype)

    def _template(self, shape: tuple[int, ...], dtype: DType) -> _Template:
        found = self._templates.get((shape, dtype))
        if found is None:
            template = Tensor.empty(*shape, dtype=dtype, device=self._device)
            graph: Any = template.uop
            leaf = graph.base
            if graph is not leaf and graph.src[0] is not leaf:
                raise TypeError(f"an empty tensor is not a reshaped buffer but {graph}")
            if len(self._templates) >= self.MOST_TEMPLATES:
                self._templates.clear()
            wrapping = None
            if graph is not leaf:
                wrapping = graph.op, graph.dtype, graph.src[1:], graph.arg, graph.tag
            number = None
            if hasattr(leaf.arg, "slot"):
                rest = {f.name: getattr(leaf.arg, f.name) for f in dataclasses.fields(leaf.arg)}
                del rest["slot"]
                number = functools.partial(type(leaf.arg), **rest)  # type: ignore[misc]
            found = _Template(template, leaf, number, wrapping)
            self._templates[shape, dtype] = found
        return found
