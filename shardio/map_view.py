"""MapView: the samples of a dataset by number, for torch's DataLoader.

They are what a ShardLoader would give: chosen fields, pictures and clips decoded, transformed. For
those who must keep their DataLoader; a ShardLoader copies less.
"""

from __future__ import annotations

import operator
import os
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from shardio._base.classes import Closing
from shardio._workers.processes.serialization import pickled
from shardio.dataset.dataset import Dataset
from shardio.errors import ClosedError, InvalidArgument
from shardio.loader import ShardLoader

_OPTIONS: Final = (
    "fields",
    "transform",
    "decode",
    "clip",
    "sound",
    "pack",
)


class MapView(Closing):
    """Samples by number: `view[i]`, or several at once, which is what DataLoader asks for.

    It travels to the workers of a DataLoader by pickle or by fork, and opens the dataset anew
    there; `transform` may be a lambda or closure. Arrays are writable copies.

    Args:
        dataset: a folder, or an open ShardDataset, also of a subset or selection.
        options: of ShardLoader, those that say what a sample is: `fields`, `transform`, `decode`,
            `clip`, `sound` and `pack`. What is drawn for a sample is not keyed by its position, but
            follows from Python's global generator, which DataLoader seeds in every worker.

    Raises:
        InvalidArgument: an option is not acceptable, or is none of these.
        DatasetNotFound, …: from opening the dataset.
        IndexError, TypeError: (later) there is no such sample; a number is no integer.
    """

    def __init__(self, dataset: str | os.PathLike[str] | Dataset, **options: Any) -> None:
        if unknown := sorted(options.keys() - {*_OPTIONS}):
            raise InvalidArgument(
                f"{', '.join(unknown)}: no option of a view; there are {', '.join(_OPTIONS)}"
            )
        self._dataset: Any = dataset
        if isinstance(dataset, str | os.PathLike):
            self._dataset = os.path.abspath(dataset)  # for processes with another working directory
        self._options = options
        self._loader: ShardLoader | None = None
        self._pid = self._n_at_once = 0
        self._asked: Sequence[int] = ()
        self._of_parent: ShardLoader | None = None
        self._closed = False
        with self._loader_of(1, sampler=None) as loader:
            self._n = len(loader)

    def _loader_of(
        self, n_rows: int, sampler: Callable[[int], Any] | None, seed: int = 0
    ) -> ShardLoader:
        return ShardLoader(
            self._dataset,
            n_rows,
            sampler=sampler,
            seed=seed,
            num_workers=0,
            output="numpy",
            tail="short",
            rank=0,
            world_size=1,
            collate="list",
            **self._options,
        )

    def __repr__(self) -> str:
        given = self._dataset
        return f"MapView({given if isinstance(given, Dataset) else repr(given)}: {self._n} samples)"

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return the samples of these numbers, in this order, loaded together."""
        numbers = [operator.index(index) for index in indices]
        for number in numbers:
            if not -self._n <= number < self._n:
                raise IndexError(f"sample {number} of {self._n}")
        self._asked = [number % self._n for number in numbers]
        if not numbers:
            return []
        samples = []
        for batch in self._opened(len(numbers)):
            for row in range(batch.n_rows):
                samples.append({name: _own(batch[name][row]) for name in batch})
        return samples

    def _opened(self, n_rows: int) -> ShardLoader:
        """Return the loader of this process, whose batches have at least n_rows rows."""
        if self._closed:
            raise ClosedError("the view is closed")
        if self._loader is None or self._pid != os.getpid() or self._n_at_once < n_rows:
            if self._loader is not None and self._pid == os.getpid():
                self._loader.close()
            elif self._loader is not None:
                # Inherited resources are not this process's to release
                self._of_parent = self._loader
            # Each worker draws its own seed: with one for all, they would yield the same samples.
            seed = random.getrandbits(63)
            self._loader = self._loader_of(n_rows, lambda _: np.array(self._asked), seed)
            self._pid, self._n_at_once = os.getpid(), n_rows
        return self._loader

    def __reduce__(self) -> tuple[Any, ...]:
        packed = pickled((self._dataset, self._options), "make those inside the transform")
        return _unpacked, (type(self), packed)

    def close(self) -> None:
        """Close the dataset's files. Samples that were returned stay valid. Idempotent."""
        self._closed = True
        if self._loader is not None and self._pid == os.getpid():
            self._loader.close()
        self._loader = None


def _unpacked(kind: type[MapView], packed: bytes) -> MapView:
    dataset, options = pickle.loads(packed)
    return kind(dataset, **options)


def _own(value: Any) -> Any:
    """Return a value that outlives its batch; arrays are copies, which torch may write to."""
    return np.array(value) if isinstance(value, np.ndarray | np.generic) else value
