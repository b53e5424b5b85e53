"""Background jobs: one of each kind, progress, and their end; histograms of any numbers."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio import InvalidArgument
from shardio.errors import ClosedError
from shardio_tools.view.jobs import FairSemaphore, Job, Jobs, in_own_thread
from shardio_tools.view.statistics import Histogram

PATIENCE_S = 60.0


def test_one_job_of_a_kind_runs_at_a_time() -> None:
    jobs, go = Jobs(), threading.Event()
    first = jobs.start("a", lambda job: go.wait(PATIENCE_S))
    assert jobs.start("a", lambda job: None) is first
    other = jobs.start("b", lambda job: "result")
    other.wait(PATIENCE_S)
    assert (other.state, other.progress, other.result) == ("done", 1.0, "result")
    go.set()
    first.wait(PATIENCE_S)
    assert jobs.start("a", lambda job: None) is not first
    jobs.close()


def test_a_job_reports_its_progress_and_stops_when_it_is_cancelled() -> None:
    reported, go = threading.Event(), threading.Event()

    def work(job: Job) -> None:
        job.report(0.25, "a quarter")
        reported.set()
        go.wait(PATIENCE_S)
        job.report(0.5)

    job = Job(work)
    reported.wait(PATIENCE_S)
    assert (job.state, job.progress, job.text) == ("running", 0.25, "a quarter")
    job.cancel()
    go.set()
    job.wait(PATIENCE_S)
    assert (job.state, job.text, job.is_cancelled) == ("failed", "stopped", True)


@pytest.mark.parametrize(
    ("error", "text", "is_bug"),
    [
        (InvalidArgument("no such thing"), "no such thing", False),
        (MemoryError(), "MemoryError", False),
        (KeyError("x"), "the viewer failed; its terminal shows the error", True),
    ],
    ids=repr,
)
def test_a_job_that_fails_says_why_and_a_bug_is_shown_on_the_terminal(
    error: Exception, text: str, is_bug: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(job: Job) -> None:
        raise error

    job = Job(work)
    job.wait(PATIENCE_S)
    assert (job.state, job.text) == ("failed", text)
    job.join(PATIENCE_S)
    assert ("Traceback" in capsys.readouterr().err) is is_bug


def test_jobs_that_share_a_semaphore_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio_tools.view.jobs._TIME_SLICE_S", -1.0)
    semaphore, done = FairSemaphore(1), ""

    def work(job: Job, name: str) -> None:
        nonlocal done
        semaphore.acquire(job)
        while done.count(name) < 3 or (name == "a" and done.count("b") < 3):
            done += name
            semaphore.yield_if_due(job)
            assert len(done) < 10_000_000
        semaphore.release(job)

    jobs = [Job(lambda job, name=name: work(job, name)) for name in "ab"]  # type: ignore[misc]
    for job in jobs:
        job.wait(PATIENCE_S)
        assert job.state == "done"
    assert "babab" in done


def test_a_job_that_is_cancelled_gives_up_its_place_in_the_queue() -> None:
    semaphore, go = FairSemaphore(1), threading.Event()

    def work(job: Job) -> None:
        semaphore.acquire(job)
        go.wait(PATIENCE_S)
        semaphore.release(job)

    jobs = [Job(work) for _ in range(3)]
    while sum(job in semaphore._waiting for job in jobs) < 2:
        threading.Event().wait(0.01)
    first, last = semaphore._waiting
    first.cancel()
    first.wait(PATIENCE_S)
    assert first.text == "stopped" and [*semaphore._waiting] == [last]
    go.set()
    last.wait(PATIENCE_S)
    assert last.state == "done"


def test_after_the_end_no_job_starts_again() -> None:
    jobs = Jobs()
    job = jobs.start("a", lambda job: None)
    job.wait(PATIENCE_S)
    jobs.close()
    assert jobs.start("a", lambda job: None) is job
    with pytest.raises(ClosedError, match="the viewer is closed"):
        jobs.start("b", lambda job: None)


numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(-1, 1),
    st.integers(-(1 << 62), 1 << 62).map(float),
)


@given(chunks=st.lists(st.lists(numbers, max_size=8), max_size=6))
def test_each_finite_number_is_counted_in_its_bin(chunks: list[list[float]]) -> None:
    found = Histogram()
    for chunk in chunks:
        found.add(np.array(chunk))
    known = [x for chunk in chunks for x in chunk if np.isfinite(x)]
    facts, bins = found.facts(), found.as_json()
    assert facts["count"] == len(known)
    assert found.n_not_finite == sum(map(len, chunks)) - len(known)
    if bins is None:
        assert not known
        return
    assert (facts["min"], facts["max"]) == (min(known), max(known))
    edges, counts = bins["edges"], bins["counts"]
    assert len(edges) == len(counts) + 1 <= 41 and sum(counts) == len(known)
    expected = np.bincount(np.searchsorted(edges, known, "right") - 1, minlength=len(counts))
    assert expected.tolist() == counts


@given(values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=50))
def test_bins_of_integers_are_whole_numbers_and_moments_are_exact(values: list[int]) -> None:
    found = Histogram()
    for value in values:
        found.add(np.array([value]))
    bins, facts = found.as_json(), found.facts()
    assert bins is not None and all(edge == int(edge) for edge in bins["edges"])
    assert facts["mean"] == pytest.approx(np.mean(values))
    assert facts["std"] == pytest.approx(np.std(values), abs=1e-9)
    assert type(facts["min"]) is int


def test_what_a_function_raises_in_its_own_thread_is_an_ordinary_error() -> None:
    def fail(error: BaseException) -> None:
        raise error

    assert asyncio.run(in_own_thread(lambda: 5)) == 5
    with pytest.raises(KeyError, match="a"):
        asyncio.run(in_own_thread(lambda: fail(KeyError("a"))))
    for error in (SystemExit(2), KeyboardInterrupt(), StopIteration()):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            asyncio.run(in_own_thread(lambda error=error: fail(error)))  # type: ignore[misc]
