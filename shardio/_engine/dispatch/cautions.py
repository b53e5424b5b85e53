"""What workers have died of, sample by sample: for passes in which such samples are skipped.

A sample is left out once two workers have died while they tried it alone. The first death of a
batch without a transform names all its samples; from then on it is done row by row.
"""

from __future__ import annotations

from typing import Final

from shardio._engine.dispatch.claims import MOST_DEATHS, Claims

_MOST_IN_VAIN: Final = 2 * MOST_DEATHS + 2
"""So many deaths of one batch from which no sample to leave out was learned are no sample's fault:
1 that names all samples, 1 for each of two samples that were tried when somebody killed workers,
and some to spare."""


class Caution:
    """What is known of one step that a worker has died of."""

    def __init__(self) -> None:
        self.left_out: dict[int, dict[int, str]] = {}
        """By row of the batch and number of the sample in the view: what not to try, and why."""
        self._n_deaths: dict[tuple[int, int], int] = {}
        self._n_in_vain = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether workers go on dying of it, and no sample can be blamed."""
        return self._n_in_vain >= _MOST_IN_VAIN

    def learn(self, claims: Claims, end: str) -> bool:
        """Note a death, how it ended; returns whether one more sample is left out now."""
        self._n_in_vain += 1
        if len(claims.places) != 1:
            return False
        (place,) = claims.places
        self._n_deaths[place] = self._n_deaths.get(place, 0) + 1
        if self._n_deaths[place] < MOST_DEATHS:
            return False
        row, number = place
        why = f"{MOST_DEATHS} workers died while they tried it alone; the last {end}"
        self.left_out.setdefault(row, {})[number] = why
        self._n_in_vain = 0
        return True
