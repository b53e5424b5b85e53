"""`convert`: runs a plan, in worker processes or here, and publishes the dataset."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from shardio._engine.channel import Channel
from shardio._engine.cpus import usable_cpus
from shardio._engine.crew import Crew, Died, Failed, Message
from shardio._engine.pieces import Pieces, send_whole
from shardio.conversion.ledger import Ledger
from shardio.conversion.plan import Unit, cut, list_inputs
from shardio.conversion.report import ConversionReport, Progress
from shardio.conversion.samples import convert_samples
from shardio.conversion.source import make_source, options_of
from shardio.conversion.staging import Staging
from shardio.conversion.unit import Job, UnitDone, convert_unit
from shardio.errors import InvalidArgument, ShardioError, WorkerDied
from shardio.format.schema import Schema
from shardio.manifest import lineage_of, publish
from shardio.writer import ShardSummary, ShardWriter

DEFAULT_KIND: Final = "videos"
ON_ERROR: Final = ("skip", "stop")

PathName = str | os.PathLike[str]


def convert(
    src: PathName | Iterable[Mapping[str, Any]],
    out: PathName,
    *,
    kind: str | None = None,
    schema: Schema | None = None,
    workers: int | None = None,
    on_error: Literal["skip", "stop"] = "skip",
    keep_partial: bool = False,
    progress: Callable[[Progress], None] | None = None,
    shard_bytes: int = 256 << 20,
    **options: Any,
) -> ConversionReport:
    """Convert a folder of files, or any iterable of samples, into a new dataset at `out`.

    Every file below `src` is looked at and accounted for in the report. A broken file gives no
    sample (`keep_partial`: those before the break); `on_error="stop"` ends at the first one in
    order of names, and publishes what comes before it. The bytes of the dataset depend on neither
    `workers` (0: in this process; default: one per usable CPU) nor the machine's speed.

    Samples from an iterable are written by this process; `schema` is for them, and is taken from
    the first sample where it is not given. `options` are the converter's own.

    Args:
        progress: called in this process, at the start and after every input.

    Raises:
        InvalidArgument: `src` does not exist or holds no file, or an option is not acceptable.
        DatasetExists: `out` already holds data.
        WorkerDied: a worker was killed. As after every other error, nothing is left in `out`.
    """
    if shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes is {shard_bytes}; it must be at least 1")
    if not isinstance(src, str | os.PathLike):
        for_files = {
            "kind": kind is not None,
            "workers": workers is not None,
            "on_error": on_error != "skip",
            "keep_partial": keep_partial,
            "progress": progress is not None,
            **dict.fromkeys(options, True),
        }
        if given := [name for name, is_given in for_files.items() if is_given]:
            raise InvalidArgument(f"{', '.join(given)}: not for samples from an iterable")
        return convert_samples(src, os.fspath(out), schema, shard_bytes)
    if schema is not None:
        raise InvalidArgument("schema: only for samples from an iterable; a converter has its own")
    if on_error not in ON_ERROR:
        raise InvalidArgument(f"on_error is {on_error!r}; it must be one of {ON_ERROR}")
    if workers is not None and workers < 0:
        raise InvalidArgument(f"workers is {workers}; it must be 0 or more")
    source = make_source(kind or DEFAULT_KIND, options)
    return _convert_files(
        os.fspath(src),
        os.path.abspath(out),
        partial(
            Job,
            source,
            shard_bytes=shard_bytes,
            keep_partial=keep_partial,
            stop_at_broken=on_error == "stop",
        ),
        usable_cpus() if workers is None else workers,
        progress,
    )


def _convert_files(
    src: str,
    out: str,
    job_in: Callable[[str], Job],
    n_workers: int,
    progress: Callable[[Progress], None] | None,
) -> ConversionReport:
    """Plan, run, publish; `job_in` makes the job once the folder for its shards is there."""
    start_s = time.monotonic()
    listing = list_inputs(src)
    units = cut(listing.inputs)
    ledger = Ledger(listing, len(units), progress)
    with Staging(out) as staging:
        job = job_in(str(staging.folder))
        ledger.tell_start()
        if n_workers:
            _run_crew(units, job, min(n_workers, len(units)), ledger)
        else:
            _run_here(units, job, ledger)
        # Readers take the schema from a shard: a dataset without samples has an empty one.
        shards = ledger.shards() or [_empty_shard(job)]
        reports = ledger.reports()
        lineage = lineage_of(job.source.schema(), shards)
        staging.move_out([shard.name for shard in shards], lineage)
        publish(
            staging.out,
            schema=job.source.schema(),
            shards=shards,
            classes=listing.classes,
            inputs=[report.as_json() for report in reports],
            converter=_described(job),
            versions=job.source.libraries(),
        )
    return ConversionReport(
        dataset=Path(out),
        kind=job.source.kind,
        n_samples=sum(shard.n_samples for shard in shards),
        n_bytes=sum(shard.n_bytes for shard in shards),
        elapsed_s=time.monotonic() - start_s,
        inputs=tuple(reports),
        classes=listing.classes,
        stopped=ledger.stopped_at is not None,
    )


def _described(job: Job) -> dict[str, Any]:
    """Name the converter and every option that has a part in the data."""
    return {
        "name": job.source.kind,
        "version": job.source.version,
        "options": {
            **options_of(job.source),
            "keep_partial": job.keep_partial,
            "on_error": "stop" if job.stop_at_broken else "skip",
            "shard_bytes": job.shard_bytes,
        },
    }


def _empty_shard(job: Job) -> ShardSummary:
    with ShardWriter(os.path.join(job.folder, "000000-000.shard"), job.source.schema()) as writer:
        return writer.close()


def _run_here(units: Sequence[Unit], job: Job, ledger: Ledger) -> None:
    while (number := ledger.next_unit()) is not None:
        convert_unit(units[number], job, ledger.take)


def _run_crew(units: Sequence[Unit], job: Job, n_workers: int, ledger: Ledger) -> None:
    """Keep `n_workers` processes busy with one unit each.

    A unit travels as a file in the staging folder: its list of inputs may be longer than a
    message can be.
    """
    with Crew(n_workers, partial(_serve, job)) as crew:
        doing: dict[int, int] = {}
        pieces = Pieces()

        def start(worker: int) -> None:
            number = ledger.next_unit()
            if number is None:
                return
            place = os.path.join(job.folder, f"{number:06d}.unit")
            with open(place, "wb") as file:
                pickle.dump(units[number], file)
            doing[worker] = number
            crew.send(worker, os.fsencode(place))

        for worker in range(n_workers):
            start(worker)
        while not ledger.is_finished():
            for event in crew.wait():
                if isinstance(event, Message):
                    whole = pieces.take(event.worker, event.data)
                    if whole is None:
                        continue
                    told = pickle.loads(whole)
                    if isinstance(told, Exception):
                        raise told
                    ledger.take(told)
                    if isinstance(told, UnitDone):
                        start(event.worker)
                else:
                    raise _ended(event, units, doing)


def _ended(event: Failed | Died, units: Sequence[Unit], doing: Mapping[int, int]) -> WorkerDied:
    """Say which worker ended, how, and over what."""
    number = doing.get(event.worker)
    inputs = units[number].inputs if number is not None else ()
    over = f" while converting {inputs[0].name} to {inputs[-1].name}" if inputs else ""
    if isinstance(event, Failed):
        return WorkerDied(
            f"a worker raised an exception{over}; nothing was published\n{event.text}"
        )
    how = f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"
    return WorkerDied(f"a worker ended with {how}{over}; nothing was published")


def _serve(job: Job, channel: Channel) -> None:
    """Convert the units that arrive, until main closes the crew. Runs in a worker."""
    while (place := channel.recv()) is not None:
        with open(place, "rb") as file:
            unit = pickle.load(file)
        os.unlink(place)
        try:
            convert_unit(unit, job, lambda event: send_whole(channel, pickle.dumps(event)))
        except (OSError, ShardioError) as error:  # the caller is to see it as it is
            send_whole(channel, pickle.dumps(error))
