"""Which of how many ranks this process is, as whoever launched it says in the environment."""

from __future__ import annotations

import os
from typing import Final

from shardio.errors import InvalidArgument

_SLURM: Final = "SLURM_PROCID"
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    # Of the step: a batch script, which runs once, has a rank and SLURM_NTASKS, too.
    (_SLURM, "SLURM_STEP_NUM_TASKS"),
)
"""The variables by which launchers tell a process its rank and how many there are."""


def told_by_launcher() -> tuple[str, int, int]:
    """What the environment says: the variable that names the rank, the rank, and how many.

    Without any, this process is the only one.

    Raises:
        InvalidArgument: what it says cannot be meant.
    """
    for name, of_size in _LAUNCHERS:
        texts = os.environ.get(name), os.environ.get(of_size)
        if texts == (None, None) or (texts[1] is None and name == _SLURM):
            continue
        try:
            rank, world_size = (int(text or "") for text in texts)
        except ValueError:
            raise InvalidArgument(
                f"the environment has {name}={texts[0]!r} and {of_size}={texts[1]!r}, where both "
                "must be numbers: set both or none, or pass rank and world_size"
            ) from None
        if rank < 0 or world_size < 1:
            raise InvalidArgument(
                f"the environment has {name}={rank} and {of_size}={world_size}; pass rank and "
                "world_size if they are not meant for this program"
            )
        return name, rank, world_size
    return "rank", 0, 1
