"""What a dataset says of itself: the parts of a generation that whoever opens it may ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardio.errors import InvalidArgument
from shardio.manifest.generation import Generation
from shardio.views import RowRuns
from shardio.writer import ShardSummary


class Described:
    """The parts of `_generation`, which a subclass sets, and its paths, before it asks for them."""

    path: str
    _root: str
    _generation: Generation

    @property
    def place(self) -> str:
        """Its folder as it was named, or absolute where a chdir has made that another one."""
        return self.path if os.path.abspath(self.path) == self._root else self._root

    @property
    def root(self) -> str:
        """Its folder, absolute, or its URL."""
        return self._root

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is a position in them."""
        return self._generation.classes

    @property
    def lineage(self) -> str:
        """What stays the same whatever is appended: an id of the first generation."""
        return self._generation.lineage

    @property
    def generation(self) -> int:
        """The number of the state that was opened."""
        return self._generation.number

    @property
    def shards(self) -> Sequence[ShardSummary]:
        """Its shards in order: name, samples, bytes, id; without those beside them."""
        return self._generation.shards

    @property
    def sides(self) -> Mapping[str, Sequence[ShardSummary]]:
        """By name, each column that was added later: its shards, in the order of `shards`."""
        return {side.name: side.shards for side in self._generation.sides}

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """What a conversion looked at, and what became of it; a long list is read only now."""
        return self._generation.inputs

    @property
    def converter(self) -> Mapping[str, Any]:
        """Which converter made it, with which options."""
        return self._generation.converter

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of what its bytes depend on."""
        return self._generation.versions

    @property
    def view(self) -> Mapping[str, Any]:
        """What a loader's samples are unless it is asked for others: rows, or clips of videos."""
        return self._generation.view

    @property
    def subsets(self) -> Mapping[str, int]:
        """The names of its subsets, and how many samples each has."""
        return {name: len(rows) for name, rows in self._generation.subsets.items()}

    @property
    def stats(self) -> Mapping[str, Any]:
        """What `shardio stats` counted: of the "whole", and of its "subsets"."""
        return self._generation.stats

    @property
    def surgery(self) -> Mapping[str, Any]:
        """What made this state of an earlier one, or of other datasets, with which options."""
        return self._generation.surgery

    def _subset_rows(self, subset: str) -> RowRuns:
        """The rows of a subset, by its name."""
        rows = self._generation.subsets.get(subset)
        if rows is None:
            known = ", ".join(map(repr, self._generation.subsets)) or "none; see shardio split"
            raise InvalidArgument(f"{self.path}: no subset {subset!r}; there are: {known}")
        return rows
