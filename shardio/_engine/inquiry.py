"""Which fields a batch has: those that are read, or what the transform makes of the first sample.

The transform is run where it always runs, in a worker, while main goes on opening files.
"""

from __future__ import annotations

from shardio._engine.claims import claim_of_first, error_of_death
from shardio._engine.recipe import Recipe
from shardio._engine.staff import Answer, Local, Loss, Workers
from shardio._engine.wire import Ask, Task
from shardio.dataset import ShardDataset
from shardio.format.schema import Schema

_ASKED = 0
"""The worker that is asked."""


class Inquiry:
    """Asks for the schema of batches, as often as it is not answered. Borrows all it is given."""

    def __init__(self, recipe: Recipe, dataset: ShardDataset, staff: Workers | Local) -> None:
        self._recipe, self._dataset, self._staff = recipe, dataset, staff
        self._is_asked = False

    def ask(self) -> Schema | None:
        """The schema, if it is known; else a worker is asked, unless it was already."""
        recipe = self._recipe
        if recipe.transform is None or not recipe.n_samples:
            return Schema({name: self._dataset.schema[name] for name in recipe.fields})
        if not self._is_asked:
            self._is_asked = True
            self._staff.give(_ASKED, Task(Ask.SCHEMA, 0, 0, 0, 0, 0, 0), None)
        return None

    def schema(self) -> Schema:
        """Ask, and wait for the answer.

        Raises:
            TransformError, WorkerDied, ShardChanged: naming the first sample; ask again.
        """
        known = self.ask()
        while known is None:
            # By `map`: a variable that holds an answer would be in the traceback of its error.
            for schema in map(self._take, self._staff.wait()):
                known = schema or known
        return known

    def _take(self, answer: Answer | Loss) -> Schema | None:
        if isinstance(answer, Loss) and answer.worker != _ASKED:
            return None
        self._is_asked = False
        if isinstance(answer, Loss):
            claim = claim_of_first(self._recipe, self._dataset)
            raise error_of_death(answer.how, answer.signal, claim, "", self._dataset)
        if answer.error is None:
            return answer.schema
        try:
            raise answer.error
        finally:
            del answer  # or the error would refer to itself, and keep the loader alive
