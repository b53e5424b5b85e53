"""Decode stored pictures, into the rows of a block or for the user's transform. Used by `fill`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardio._base.phase_timers import DECODE, SPENT, now_ns
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument, MediaError
from shardio.media.image import MAX_PIXELS, decode_image
from shardio.shard.verification import Rows

Pixels = npt.NDArray[np.uint8]


class Pictures:
    """Decodes the pictures of a dataset, which it borrows.

    Args:
        dataset: where they are stored.
        names: the fields that are decoded.
        dct: as `media.decode_image` has it.
    """

    def __init__(self, dataset: Dataset, names: tuple[str, ...], dct: Any) -> None:
        self._dataset, self.names, self._dct = dataset, frozenset(names), dct

    def decode(self, data: Any, name: str, shard: int, row: int, out: Pixels | None = None) -> Any:
        """Decode one picture, into `out` if that is given.

        Args:
            data: its file.
            name, shard, row: its place, for messages; the row in its shard.

        Raises:
            MediaError: it does not decode, or is not of the size that it is said to have.
        """
        start_ns = now_ns()
        try:
            pixels = decode_image(data, out=out, dct=self._dct)
        except (MediaError, InvalidArgument) as error:
            path = self._dataset.files.reader(shard, name).path
            raise MediaError(f"{path}, field {name!r}, sample {row}: {error}") from error
        SPENT.sums_ns[DECODE] += now_ns() - start_ns
        return pixels

    def of_sample(self, sample: dict[str, Any], shard: int, row: int) -> dict[str, Any]:
        """A sample with its pictures decoded, in new memory."""
        for name in self.names:
            if sample[name] is not None:
                sample[name] = self.decode(sample[name], name, shard, row)
        return sample

    def shapes(self, name: str, shard: int, rows: Rows) -> npt.NDArray[np.int64]:
        """What shapes some rows of a shard decode to, (n, 3); zeros where there is no picture.

        Raises:
            ShardCorrupt: no picture has such a shape; MediaError: it is too large.
        """
        reader = self._dataset.files.reader(shard, name)
        found = reader.records.shapes(name, rows).astype(np.int64)
        found[:, 2] = 3
        found[~reader.records.present(name, rows)] = 0
        most = found[:, 0] * found[:, 1]
        wrong = np.flatnonzero((found[:, :2].max(1) > MAX_PIXELS) | (most > MAX_PIXELS))
        for i in wrong[:1].tolist():
            height, width, _ = found[i].tolist()
            raise MediaError(
                f"{reader.path}, field {name!r}, sample {int(rows[i])}: a picture of "
                f"{height}x{width} pixels: expected 1 to {MAX_PIXELS} pixels"
            )
        return found
