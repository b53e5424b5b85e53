"""Point clouds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.types.arrays import RECORD_ALIGNMENT, Array
from shardio.format.types.field import Content, Dims, RecordField

CLOUD = Array("float32", (None, 3))


@dataclass(frozen=True, slots=True)
class Points(RecordField):
    """A field of point clouds: any number of points, each three finite float32."""

    code: ClassVar[int] = 201
    alignment: ClassVar[int] = RECORD_ALIGNMENT

    @property
    def array(self) -> Array:
        """The points: batches, transforms and exports treat them as such an array."""
        return Array("float32", (None, 3), self.codec, optional=self.optional)

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The number of points."""
        return CLOUD.stored_dims

    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        record, shape = CLOUD.encode_record(name, value)
        if not np.isfinite(np.frombuffer(record, np.float32)).all():
            raise SchemaError(f"field {name!r}: a point is not finite")
        return record, shape

    def shape_of(self, dims: Dims, n_bytes: int) -> tuple[int, ...]:
        """Return the shape of the points."""
        return CLOUD.shape_of(dims, n_bytes)

    def decode(self, record: Content, shape: tuple[int, ...]) -> Any:
        """Return the points."""
        return CLOUD.decode(record, shape)

    def check_record(self, record: Content, dims: Dims) -> None:
        """Check the shape, and that all points are finite."""
        CLOUD.check_record(record, dims)
        if not np.isfinite(np.frombuffer(record, np.float32)).all():
            raise ShardCorrupt("a point is not finite", code="value")
