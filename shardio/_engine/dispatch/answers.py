"""What comes back to main of the tasks that it gives out: answers, and the news of losses."""

from __future__ import annotations

from typing import NamedTuple

from shardio._engine.dispatch.wire import Done
from shardio._engine.filling.recipe import Schemas
from shardio.batch.batch import Skipped


class Answer(NamedTuple):
    """What a worker answers to a task: done, and what goes with it.

    That is an error, schemas, or the samples that were skipped.
    """

    worker: int
    done: Done
    error: BaseException | None = None
    schemas: Schemas | None = None
    skips: tuple[Skipped, ...] = ()


class Loss(NamedTuple):
    """A worker has died; another has taken its place, and knows nothing of its tasks.

    `how` is a sentence about it; `end` is how it ended, the same for whichever worker.
    """

    worker: int
    how: str
    signal: int | None = None
    end: str = "died"
