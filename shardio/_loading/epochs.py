"""Where a loader is: which epoch comes next, how far the latest one has come, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardio._engine.dispatch.engine import Engine
from shardio._engine.dispatch.iterations import Iteration
from shardio._engine.filling.batch_spec import Plan
from shardio._loading.epoch_sampler import Course, Progress, progress_of, state_of
from shardio._loading.options import Options, warn_of_no_batch
from shardio.dataset.dataset import Dataset
from shardio.order.partition import Division


class Epochs:
    """The epochs of a loader, for one rank.

    Args:
        dataset: what is read.
        options: of the loader.

    Raises:
        InvalidArgument: a sampler or weights that do not fit the dataset.
    """

    def __init__(self, dataset: Dataset, options: Options) -> None:
        self.course = Course(dataset, options.choice)
        """Which samples they have, in which order."""
        self.latest: Iteration | None = None
        """The latest that was begun since there is a loader, or since a state was loaded."""
        self._options = options
        self._next: Progress | int = 0
        """Where the next one begins: a place that was loaded, or the epoch."""
        self._has_warned = False

    @property
    def number(self) -> int:
        """That of the latest, or of the one that comes next; 0 at first."""
        return self._start().epoch if self.latest is None else self.latest.plan.epoch

    @property
    def n_batches(self) -> int:
        """How many a whole epoch has that begins now."""
        return self._division(0, self.course.n_positions(self.number)).last_step

    def begin(self, engine: Engine) -> Iteration:
        """Begin the next one."""
        start, course = self._start(), self.course
        self._warn_of_no_batch(start)
        successor = self._plan(course.beginning(start.epoch + 1)) if course.is_foreseen else None
        self.latest = engine.iterate(self._plan(start), successor)
        self._next = start.epoch + 1
        return self.latest

    def _warn_of_no_batch(self, start: Progress) -> None:
        """Warn, once for a loader, of a whole epoch of which tail="drop" leaves nothing."""
        asked, n = self._options, start.n_samples
        if asked.tail != "drop" or self._has_warned or start.position or not n:
            return
        if not self._division(0, n).last_step:
            self._has_warned = True
            warn_of_no_batch(start.epoch, n, asked.batch_size, asked.world_size)

    def state(self, dataset: Dataset) -> dict[str, Any]:
        """How far the latest has come, for `load_state`."""
        progress = self._progress()
        return state_of(progress, dataset, self.course.identity(progress.epoch))

    def load_state(self, state: Mapping[str, Any], dataset: Dataset) -> None:
        """Have the next one begin where a state was taken.

        Raises:
            InvalidArgument: it is no state, or one of another dataset, subset, seed or order.
        """
        self._next = progress_of(state, dataset, self.course.identity)
        self.latest = None

    def _start(self) -> Progress:
        place = self._next
        return place if isinstance(place, Progress) else self.course.beginning(place)

    def _progress(self) -> Progress:
        latest = self.latest
        if latest is None or latest.is_exhausted:
            return self._start()
        plan, position = latest.plan, latest.plan.division.position(latest.n_handed_over)
        return Progress(plan.epoch, position, plan.division.n, plan.window, plan.sizes, plan.tokens)

    def _plan(self, start: Progress) -> Plan:
        return self.course.plan(start, self._division(start.position, start.n_samples))

    def _division(self, position: int, n_samples: int) -> Division:
        asked = self._options
        place = asked.rank, asked.world_size
        return Division(n_samples, position, asked.batch_size, *place, asked.tail)
