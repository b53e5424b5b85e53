"""What is known of a running conversion: which units are done, and what became of every input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardio.conversion.inputs import Listing
from shardio.conversion.plan import InputDone, Unit, UnitDone, UnitEvent
from shardio.conversion.report import InputReport, Progress
from shardio.conversion.source import Outcome
from shardio.shard.writer import ShardSummary


class Ledger:
    """What is known of every unit so far, and which is to be done next. Pure bookkeeping.

    `send` is told of every shard of a unit that is done: where it lies, and as it is published.

    Once a unit has stopped at a broken input, only the units before it count: whatever later
    ones did, in whatever order, is forgotten. So the result does not depend on the workers.
    """

    def __init__(
        self,
        listing: Listing,
        units: Sequence[Unit],
        progress: Callable[[Progress], None] | None,
        send: Callable[[str, ShardSummary], object] | None = None,
    ) -> None:
        self._listing, self._progress, self._send = listing, progress, send
        self._units, self._n_begun = units, 0
        self._running: set[int] = set()
        self._done: dict[int, InputDone] = {}
        self._shards: dict[int, tuple[ShardSummary, ...]] = {}
        self._n_bytes = listing.n_bytes  # of all inputs: summed once, it is told after each
        self._n_bytes_done = self._n_samples = self._n_broken = 0
        self.stopped_at: int | None = None

    def next_unit(self) -> int | None:
        """Give the number of a unit to start; None when no more are to be started."""
        if self.stopped_at is not None or self._n_begun == len(self._units):
            return None
        number = self._n_begun
        self._n_begun += 1
        self._running.add(number)
        return number

    def is_finished(self) -> bool:
        """Whether everything that counts has been done."""
        if self.stopped_at is None:
            return not self._running and self._n_begun == len(self._units)
        return not any(number <= self.stopped_at for number in self._running)

    def take(self, event: UnitEvent) -> None:
        """Note what a unit says; a unit that is done again says the same of its inputs again."""
        if isinstance(event, InputDone):
            is_news = event.position not in self._done
            self._done[event.position] = event
            if is_news:
                self._tell(event)
        elif isinstance(event, UnitDone):
            self._shards[event.unit] = event.shards
            self._running.discard(event.unit)
            if event.stopped and (self.stopped_at is None or event.unit < self.stopped_at):
                self.stopped_at = event.unit
            if self._send is not None and self._counts(event.unit):
                for place, shard in self._shards_of(event.unit):
                    self._send(place, shard)

    def _counts(self, unit: int) -> bool:
        return self.stopped_at is None or unit <= self.stopped_at

    def _shards_of(self, unit: int) -> list[tuple[str, ShardSummary]]:
        made = self._units[unit]
        return [(f"{made.key}/{one.name}", made.published(one)) for one in self._shards[unit]]

    def shards(self) -> list[tuple[str, ShardSummary]]:
        """The shards that count, in order of the plan: where each lies, and as it is published."""
        units = [unit for unit in sorted(self._shards) if self._counts(unit)]
        return [placed for unit in units for placed in self._shards_of(unit)]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes."""
        return self._listing.classes

    def reports(self) -> list[InputReport]:
        """What became of every input, in order."""
        reports = []
        for position, source in enumerate(self._listing.inputs):
            done = self._done.get(position)
            if done is None or (self.stopped_at is not None and done.unit > self.stopped_at):
                done = InputDone(-1, position, Outcome("not_processed"), 0, source.n_bytes)
            outcome = done.outcome
            reports.append(
                InputReport(
                    source.name,
                    outcome.kind,
                    outcome.reason,
                    done.n_samples,
                    done.n_bytes,
                    outcome.detail,
                    source.label,
                    done.hash,
                )
            )
        return reports

    def tell_start(self) -> None:
        """Report the size of what is to be done."""
        self._tell(None)

    def _tell(self, done: InputDone | None) -> None:
        name = reason = ""
        kind = None
        if done is not None:
            source = self._listing.inputs[done.position]
            self._n_bytes_done += source.n_bytes
            self._n_samples += done.n_samples
            self._n_broken += done.outcome.kind == "broken"
            name, kind, reason = source.name, done.outcome.kind, done.outcome.reason
        if self._progress is None:
            return
        self._progress(
            Progress(
                n_inputs_done=len(self._done),
                n_inputs=len(self._listing.inputs),
                n_bytes_done=self._n_bytes_done,
                n_bytes=self._n_bytes,
                n_samples=self._n_samples,
                n_broken=self._n_broken,
                name=name,
                outcome=kind,
                reason=reason,
            )
        )


class UnitLog:
    """What is said of one unit: in place of the ledger, where that is on another machine."""

    def __init__(self) -> None:
        self._done: dict[int, InputDone] = {}
        self._end: UnitDone | None = None
        self._has_begun = False

    def next_unit(self) -> int | None:
        """Give the unit's number, once."""
        if self._has_begun:
            return None
        self._has_begun = True
        return 0

    def is_finished(self) -> bool:
        """Whether the unit is done."""
        return self._end is not None

    def take(self, event: UnitEvent) -> None:
        """Note what the unit says; of an input that is done again, the last."""
        if isinstance(event, InputDone):
            self._done[event.position] = event
        elif isinstance(event, UnitDone):
            self._end = event

    def events(self, number: int) -> tuple[UnitEvent, ...]:
        """All of it, as of the unit of that number."""
        done = (event._replace(unit=number) for event in self._done.values())
        return (*done, *([] if self._end is None else [self._end._replace(unit=number)]))
