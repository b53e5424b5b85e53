"""Jobs for each shard of a dataset, in worker processes."""

import os
from pathlib import Path

import pytest

from shardio._workers.ray_cluster import LOCAL
from shardio.maintenance.jobs import run_jobs


def _job(item: str) -> tuple[str, int]:
    return item, os.getpid()


@pytest.mark.process
@pytest.mark.parametrize("starts_here", [False, True])
def test_every_job_is_run_once_and_some_in_the_caller_only_if_asked(
    tmp_path: Path, *, starts_here: bool
) -> None:
    items = [f"shard {k}" for k in range(50)]
    results = dict(
        run_jobs(
            _job,
            items,
            workers=2,
            engine=LOCAL,
            shared_path=tmp_path,
            preload=__name__,
            starts_here=starts_here,
        )
    )
    assert sorted(results) == list(range(50))
    assert [results[k][0] for k in range(50)] == items
    assert (os.getpid() in {pid for _, pid in results.values()}) == starts_here
