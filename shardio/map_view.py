"""MapView: a map-style dataset over shards, for torch's DataLoader.

A sample has the same content as in a batch of a ShardLoader. Use MapView only in code that must
keep its DataLoader, because a ShardLoader copies less data.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardio._base.callers import (
    ANY_OPTION,
    missing_attribute,
    path_as_given,
    refuse_unknown_options,
    refuses,
    row_index,
)
from shardio._base.classes import Closing
from shardio._base.html import fragment
from shardio._loading.options import dataset_advice
from shardio._workers.processes.serialization import pickled
from shardio.errors import ClosedError, InvalidArgument
from shardio.loader import ShardLoader
from shardio.samples.mixture import Mixture
from shardio.samples.open_dataset import OpenDataset
from shardio.samples.shard_dataset import dataset_path
from shardio.samples.view import SampleView
from shardio.storage.remote.connection import is_url

__all__ = ["MapView"]

_OPTIONS: Final = ("fields", "transform", "decode", "layout")
_OPTION_ADVICE: Final = dataset_advice("MapView({})") | {
    **dict.fromkeys(("device", "output"), "torch's DataLoader makes tensors of the arrays"),
}
_SEVERAL: Final = "view.__getitems__(indices), and for one field [sample[name] for sample in view]"
_ATTRIBUTE_ADVICE: Final = {
    name: f"write shardio.open(path).{name}, and pass the dataset to MapView"
    for name in ("classes", "schema", "stats", "subset", "subsets")
}


class MapView(Closing):
    """A collection of samples by index: `view[i]` is sample i.

    `__getitems__`, which DataLoader uses, loads several samples at once. A MapView can be pickled,
    and used in a forked process; each worker of a DataLoader opens the dataset again. The arrays of
    a sample are writable copies.

    Args:
        dataset: a folder or its URL, an open dataset, or a view of one, such as
            `dataset.clips(frames=16)`; not a mixture.
        options: `fields`, `transform`, `decode` and `layout` of ShardLoader. The seed of the
            transform's random numbers is drawn from Python's global random generator, which
            DataLoader seeds differently in each worker.

    Raises:
        InvalidArgument: an option is invalid, or `dataset` is a mixture.
        TypeError: an option is not `fields`, `transform`, `decode` or `layout`.
        DatasetNotFound, …: the dataset cannot be opened.
        IndexError, TypeError: (from `view[i]`) an index is out of range or not an integer.
    """

    @refuses({ANY_OPTION: "write MapView(dataset, transform=f)"}, "MapView")
    def __init__(
        self, dataset: str | os.PathLike[str] | OpenDataset | SampleView, **options: Any
    ) -> None:
        refuse_unknown_options("MapView", options, _OPTIONS, _OPTION_ADVICE)
        source = dataset.dataset if isinstance(dataset, SampleView) else dataset
        if isinstance(source, Mixture):
            raise InvalidArgument(
                "MapView takes no mixture, because indices do not follow the weights: make a "
                "MapView of each source and join them, for example with torch's ConcatDataset, or "
                "load the mixture with a ShardLoader"
            )
        self._dataset: Any = dataset
        self._path: str | None = None
        if isinstance(dataset, str | os.PathLike):
            self._path = dataset_path(dataset)
            # An absolute path is also valid in processes with another working directory.
            self._dataset = self._path if is_url(self._path) else os.path.abspath(self._path)
        self._options = options
        self._loader: ShardLoader | None = None
        self._pid = self._batch_size = 0
        self._indices: Sequence[int] = ()
        self._parent_loader: ShardLoader | None = None
        self._closed = False
        with self._new_loader(1, sampler=None) as loader:
            self._n_samples = len(loader)

    def _new_loader(
        self, n_rows: int, sampler: Callable[[int], Any] | None, seed: int = 0
    ) -> ShardLoader:
        return ShardLoader(
            self._shown,
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

    @property
    def _shown(self) -> Any:
        """The dataset as the user gave it, or its absolute path after a chdir."""
        if self._path is None or is_url(self._path):
            return self._dataset
        return path_as_given(self._path, self._dataset)

    def __repr__(self) -> str:
        return f"MapView({self._shown!r}: {self._n_samples} samples{', closed' * self._closed})"

    def _repr_html_(self) -> str:
        before = "fields before the transform:" if "transform" in self._options else ""
        with self._new_loader(1, sampler=None) as loader:
            table = loader.read_schema.html_table()
            facts = loader.view.summary, "closed" * self._closed, before
            return fragment("MapView", loader.dataset.path, facts, table)

    if not TYPE_CHECKING:  # for type checkers, a view would have every attribute

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, _ATTRIBUTE_ADVICE)

    def __len__(self) -> int:
        return self._n_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return the samples with the given indices, in the given order; load them as one batch."""
        numbers = [row_index("view", i, _SEVERAL) for i in indices]
        for number in numbers:
            if not -self._n_samples <= number < self._n_samples:
                raise IndexError(f"sample {number} of {self._n_samples}")
        self._indices = [number % self._n_samples for number in numbers]
        if not numbers:
            return []
        samples = []
        for batch in self._loader_for(len(numbers)):
            for row in range(batch.n_rows):
                samples.append({name: _copied(batch[name][row]) for name in batch})
        return samples

    def _loader_for(self, n_rows: int) -> ShardLoader:
        """Return a loader that this process has created, with a batch size of at least n_rows."""
        if self._closed:
            raise ClosedError("the view is closed: create another one, MapView(dataset)")
        if self._loader is None or self._pid != os.getpid() or self._batch_size < n_rows:
            if self._loader is not None and self._pid == os.getpid():
                self._loader.close()
            elif self._loader is not None:
                # Keep the parent process's loader from being garbage-collected in this process.
                self._parent_loader = self._loader
            # Each worker draws its own seed. With a common seed, the transforms in all workers
            # would draw the same random numbers.
            seed = random.getrandbits(63)
            self._loader = self._new_loader(n_rows, lambda _: np.array(self._indices), seed)
            self._pid, self._batch_size = os.getpid(), n_rows
        return self._loader

    def __reduce__(self) -> tuple[Any, ...]:
        packed = pickled((self._dataset, self._options), "make those inside the transform")
        return _unpacked, (type(self), packed)

    def close(self) -> None:
        """Close the dataset's files. Returned samples stay valid. Idempotent."""
        self._closed = True
        if self._loader is not None and self._pid == os.getpid():
            self._loader.close()
        self._loader = None


def _unpacked(kind: type[MapView], packed: bytes) -> MapView:
    dataset, options = pickle.loads(packed)
    return kind(dataset, **options)


def _copied(value: Any) -> Any:
    """Return the value or, if it is an array, a writable copy that stays valid after the batch."""
    return np.array(value) if isinstance(value, np.ndarray | np.generic) else value
