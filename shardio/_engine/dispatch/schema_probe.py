"""The schema of batches: that of the fields read, or of the first transformed sample or batch.

User functions run where they always run, in a worker, while main goes on opening files. If samples
may be skipped and the first one fails, others are tried.
"""

from __future__ import annotations

import time

from shardio._engine.dispatch.backends import InlineWorker, WorkerBackend
from shardio._engine.dispatch.crashes import claim_of_first, error_of_death, is_final
from shardio._engine.dispatch.protocol import RequestKind, Task, TaskResult, WorkerLost
from shardio._engine.filling.batch_spec import BatchSpec, Schemas
from shardio._engine.filling.row_by_row import may_skip
from shardio.dataset.dataset import Dataset
from shardio.errors import WorkerDied

_NEXT, _SPREAD = 8, 24
"""The number of samples tried for the schema: the first ones, and some from all over the view."""
_ASKED = 0
"""The worker that is asked."""


class SchemaProbe:
    """A request for the schemas of batches, until it is answered. Borrows its arguments."""

    def __init__(
        self, recipe: BatchSpec, dataset: Dataset, staff: WorkerBackend | InlineWorker
    ) -> None:
        self._recipe, self._dataset, self._staff = recipe, dataset, staff
        self._is_asked = False
        self._n_deaths = 0
        self._candidates = _candidates(recipe.n_samples) if recipe.skips else [0]
        self._number = 0
        """The index of the candidate that is tried."""

    @property
    def _sample(self) -> int:
        return self._candidates[self._number]

    def ask(self) -> Schemas | None:
        """Return the schemas if they are known; else ask a worker, unless it was asked already."""
        recipe = self._recipe
        if not recipe.runs_user_code or not recipe.n_samples:
            return Schemas(recipe.delivered(self._dataset))
        if not self._is_asked:
            self._is_asked = True
            self._staff.give(_ASKED, Task(RequestKind.SCHEMA, 0, 0, 0, self._sample, 0, 0), None)
            self._staff.post()
        return None

    def schemas(self, timeout_s: float | None = None) -> Schemas | None:
        """Ask, and wait for the answer; return None if it does not come within `timeout_s`.

        The time in which workers start is not counted.

        Raises:
            TransformError, WorkerDied, ShardChanged: naming the sample; ask again.
        """
        known = self.ask()
        since_s = time.monotonic()
        while known is None:
            left_s = None
            if timeout_s is not None:
                left_s = since_s + timeout_s - time.monotonic()
                if left_s <= 0:
                    return None
            n_answers, is_starting = 0, self._staff.is_starting
            # By `map`: a variable that holds an answer would be in the traceback of its error.
            for schemas in map(self._take, self._staff.wait(left_s)):
                known = schemas or known
                n_answers += 1
            if not n_answers and is_starting:
                since_s = time.monotonic()
        return known

    def tasks_of(self, worker: int) -> list[str]:
        """Describe a worker's unanswered request."""
        is_busy = self._is_asked and worker == _ASKED
        return [claim_of_first(self._recipe, self._dataset, self._sample).text] if is_busy else []

    def _take(self, answer: TaskResult | WorkerLost) -> Schemas | None:
        if isinstance(answer, WorkerLost) and not (self._is_asked and answer.worker == _ASKED):
            return None  # it died idle, perhaps just after its answer
        self._is_asked = False
        if isinstance(answer, WorkerLost):
            return self._ask_again(answer)
        if answer.error is None:
            return answer.schemas
        if may_skip(answer.error) and self._has_another():
            return self.ask()
        try:
            raise answer.error
        finally:
            del answer  # or the error would refer to itself, and keep the loader alive

    def _has_another(self) -> bool:
        """Return True if there is another sample to try; if not, start over at the first."""
        self._number = (self._number + 1) % len(self._candidates)
        return self._number > 0

    def _ask_again(self, loss: WorkerLost) -> Schemas | None:
        """Ask another worker, unless the first sample has crashed enough of them."""
        self._n_deaths += 1
        claim = claim_of_first(self._recipe, self._dataset, self._sample)
        n = self._n_deaths
        many = f", which {n} workers have died of" if n > 1 else ""
        error = error_of_death(loss.how, loss.signal, claim, many, self._dataset)
        if not is_final(error, self._n_deaths):
            return self.ask()
        self._n_deaths = 0
        if isinstance(error, WorkerDied) and self._has_another():
            self._staff.forgive()
            return self.ask()
        try:
            raise error
        finally:
            del error  # as above


def _candidates(n_samples: int) -> list[int]:
    """Return the samples that are tried for the schema, in order, each once."""
    spread = [n_samples * (i + 1) // (_SPREAD + 1) for i in range(_SPREAD)]
    first = range(min(_NEXT, n_samples))
    return list(dict.fromkeys([*first, *spread])) if n_samples else [0]
