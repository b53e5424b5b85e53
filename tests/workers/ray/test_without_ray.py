"""Jobs that end, fail and are lost, on a stand-in for Ray that runs them here.

It needs no Ray; `test_on_ray.py` tests the real one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardio import Array, __version__
from shardio._workers import ray_cluster
from shardio._workers.processes.zygote import release
from shardio._workers.ray_cluster import Cluster, Engine
from shardio.conversion import scheduler
from shardio.conversion.journal import Unit
from shardio.conversion.scheduler import run_in_workers
from shardio.errors import InvalidArgument, TransformError, UnsupportedEnvironment, WorkerDied
from shardio.maintenance import add_column, compute_stats, verify_dataset
from tests.lines import contents, convert, install, write

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")


class RayError(Exception):
    pass


class NodeDied(RayError):
    pass


class ObjectLost(RayError):
    pass


class Crashed(RayError):
    pass


class Reference:
    def __init__(self, value: Any = None, call: Callable[[], Any] | None = None) -> None:
        self.value, self.call = value, call


class StandIn:
    """Does a job when its result is asked for, or what it was told that becomes of the job."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        NodeDiedError=NodeDied,
        ObjectLostError=ObjectLost,
        WorkerCrashedError=Crashed,
        OutOfMemoryError=type("OutOfMemory", (RayError,), {}),
    )

    def __init__(self) -> None:
        self.fates: list[RayError | str | None] = []  # of the first jobs
        self.cancelled: list[Reference] = []
        self.options: dict[str, Any] = {}
        self.dead: list[str] = []
        self.n_alive = 1
        self.refusal: Exception | None = None
        self.is_on = False

    def is_initialized(self) -> bool:
        return self.is_on

    def init(self, place: str, **options: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.is_on = True

    def shutdown(self) -> None:
        self.is_on = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        dead = [{"NodeID": name, "Alive": False, "Resources": {"GPU": 8.0}} for name in self.dead]
        alive = {"NodeID": "here", "Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}}
        return [*dead, *[alive] * self.n_alive]

    def put(self, value: Any) -> Reference:
        return Reference(value)

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        self.options = options

        def given(function: Any) -> Any:
            def submit(*values: Any) -> Reference:
                fate = self.fates.pop(0) if self.fates else None
                if fate == "silence":
                    self.dead.append(f"node {len(self.dead)}")
                    return Reference("silence")
                return Reference(fate, lambda: function(*values))

            return SimpleNamespace(remote=submit)

        return given

    def wait(self, references: Sequence[Reference], **_: Any) -> tuple[Any, Any]:
        done = [each for each in references if each.value != "silence"][-1:]
        return done, [each for each in references if each not in done]

    def get(self, reference: Reference) -> Any:
        if isinstance(reference.value, NodeDied):
            self.dead.append(f"node {len(self.dead)}")
            if reference.call is not None:
                reference.call()  # done, and lost before it could say so
        if isinstance(reference.value, RayError):
            raise reference.value
        return reference.value if reference.call is None else reference.call()

    def cancel(self, reference: Reference, force: bool) -> None:  # noqa: FBT001
        self.cancelled.append(reference)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(ray_cluster, "_exit_with_parent", lambda parent: None)
    monkeypatch.setattr(ray_cluster, "_CHECK_INTERVAL_S", -1.0)
    yield stand_in
    assert not stand_in.is_on
    ray_cluster._function.cache_clear()
    if scheduler._shared_zygote.cache_info().currsize:
        release(scheduler._shared_zygote())
        scheduler._shared_zygote.cache_clear()


def squares(tmp_path: Path, n_jobs: int = 5, **options: Any) -> list[tuple[int, int]]:
    """Return the results of jobs, in the order of their numbers."""
    jobs = iter(enumerate(range(n_jobs)))
    with Cluster(Engine("ray"), shared_path=tmp_path, **options) as opened:
        found = opened.run(lambda n: n * n, lambda: next(jobs, None), lambda n: f"job {n}")
        return sorted(found)


def run_one(tmp_path: Path, function: Callable[[int], Any], **options: Any) -> None:
    with Cluster(Engine("ray", **options), shared_path=tmp_path) as opened:
        next(opened.run(function, lambda: (0, 3), str))


ALL = [(n, n * n) for n in range(5)]


def test_jobs_are_done_in_any_order(ray: StandIn, tmp_path: Path) -> None:
    assert squares(tmp_path) == ALL
    assert ray.options["max_retries"] == 0  # what is lost is begun again here, where it is known


@pytest.mark.parametrize(
    "fate", [NodeDied("gone"), ObjectLost("with its machine"), Crashed("signal 9"), "silence"]
)
def test_a_lost_job_is_done_again(ray: StandIn, tmp_path: Path, fate: RayError | str) -> None:
    ray.fates = [fate]
    assert squares(tmp_path) == ALL
    assert [each.value for each in ray.cancelled].count("silence") == (fate == "silence")


def test_of_copies_of_a_job_the_first_result_counts(ray: StandIn, tmp_path: Path) -> None:
    calls: list[int] = []
    ray.fates = ["silence"]
    jobs = iter(enumerate(range(2)))
    with Cluster(Engine("ray"), shared_path=tmp_path) as opened:
        found = opened.run(calls.append, lambda: next(jobs, None), str)
        assert sorted(number for number, _ in found) == [0, 1]
    assert sorted(calls) == [0, 1]
    assert len(ray.cancelled) == 2  # the silent one, and the copy of the other


def test_a_copy_that_fails_is_nothing_where_another_goes_on(ray: StandIn, tmp_path: Path) -> None:
    ray.fates = [None, "silence", RayError("its machine was cut off")]
    assert squares(tmp_path, 2) == ALL[:2]
    assert [each.value for each in ray.cancelled] == ["silence"]


@pytest.mark.parametrize(
    ("fates", "said"),
    [
        ([Crashed("signal 9\nmore")] * 2, "2 processes crashed on job 0; .*one: signal 9$"),
        (
            [NodeDied("gone")] * 2 * ray_cluster.MAX_LOST,
            "8 machines were lost while working on job 0",
        ),
        (["silence", *[NodeDied("gone")] * 2 * ray_cluster.MAX_LOST], "8 machines were lost"),
        (["silence"] * ray_cluster.MAX_LOST, "8 machines were lost while working on job 0"),
        ([RayError("unheard of")], "Ray failed on job 0: unheard of"),
    ],
)
def test_a_job_that_is_lost_too_often_is_named(
    ray: StandIn, tmp_path: Path, fates: list[RayError | str | None], said: str
) -> None:
    ray.fates = fates
    with pytest.raises(WorkerDied, match=said):
        squares(tmp_path, 1)


def test_a_job_is_not_blamed_for_what_others_lost(ray: StandIn, tmp_path: Path) -> None:
    ray.n_alive = 100
    ray.fates.extend(["silence"] * 10 * ray_cluster.MAX_LOST)
    assert squares(tmp_path) == ALL


def test_a_job_may_be_lost_less_often(ray: StandIn, tmp_path: Path) -> None:
    ray.fates = [NodeDied("gone") for _ in range(ray_cluster.MAX_LOST - 1)]
    assert squares(tmp_path, 1) == ALL[:1]


@pytest.mark.parametrize(
    ("shared_path", "version", "said"),
    [
        ("nowhere", __version__, "does not see .*nowhere"),
        (".", "0", "has shardio .*, this one 0: install the same version everywhere"),
    ],
)
def test_what_a_machine_lacks_it_says(
    tmp_path: Path, shared_path: str, version: str, said: str
) -> None:
    found = ray_cluster.do_job([], str(tmp_path / shared_path), version, 0)
    assert isinstance(found, UnsupportedEnvironment)
    assert re.search(said, str(found))


@pytest.mark.parametrize("gpus", [1.5, float("nan"), float("inf"), 0.00001])
def test_what_is_no_share_of_a_gpu_is_refused(ray: StandIn, gpus: float) -> None:
    with pytest.raises(InvalidArgument, match=r"a share of one GPU such as 0\.5"):
        Engine("ray", gpus=gpus)


def test_more_gpus_than_a_machine_has_are_refused(ray: StandIn, tmp_path: Path) -> None:
    ray.dead = ["with eight"]
    with pytest.raises(UnsupportedEnvironment, match="gpus is 2: no machine .*; the maximum is 1$"):
        run_one(tmp_path, abs, gpus=2)


def test_a_cluster_of_other_versions_is_refused_with_both(ray: StandIn, tmp_path: Path) -> None:
    ray.refusal = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.9\n    Python: 3.12.1\n"
        "This process on 10.0.0.1 was started with:\n    Ray: 2.60\n    Python: 3.11.2\n"
    )
    with pytest.raises(UnsupportedEnvironment, match=r"with: Ray: 2\.9 .* with: Ray: 2\.60 Python"):
        squares(tmp_path)


class Unpicklable(Exception):
    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)


def test_an_error_that_cannot_travel_has_its_text_do_so(ray: StandIn, tmp_path: Path) -> None:
    def fail(number: int) -> None:
        raise Unpicklable("it broke", "here")

    with pytest.raises(TransformError, match=r"(?s)Unpicklable: it broke\non machine .*in fail"):
        run_one(tmp_path, fail)


def test_a_job_that_exits_is_told_with_its_place(ray: StandIn, tmp_path: Path) -> None:
    def leave(number: int) -> None:
        sys.exit(number)

    with pytest.raises(WorkerDied, match=r"(?s)a job called sys.exit.*in leave"):
        run_one(tmp_path, leave)


def test_machines_without_shardio_are_told_as_such(ray: StandIn, tmp_path: Path) -> None:
    ray.fates = [RayError("ModuleNotFoundError: No module named 'shardio'")]
    with pytest.raises(UnsupportedEnvironment, match="lacks shardio: install version"):
        squares(tmp_path, 1)


def test_a_connection_of_the_program_stays(ray: StandIn, tmp_path: Path) -> None:
    ray.is_on = True
    assert squares(tmp_path) == ALL
    assert ray.is_on
    ray.is_on = False


@pytest.mark.parametrize(("options", "n_begun"), [({}, 4), ({"n_at_once": 1}, 1)])
def test_jobs_at_once(ray: StandIn, tmp_path: Path, options: dict[str, int], n_begun: int) -> None:
    jobs = iter(enumerate(range(9)))
    with Cluster(Engine("ray"), shared_path=tmp_path, **options) as opened:
        next(opened.run(abs, lambda: next(jobs, None), str))
    assert len(list(jobs)) == 9 - n_begun


def test_an_address_where_nothing_answers_is_named(ray: StandIn, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedEnvironment, match=r"Ray at '127.0.0.1:1' cannot be reached"):
        with Cluster(Engine("ray", "127.0.0.1:1"), shared_path=tmp_path):
            pass


def test_less_than_one_job_at_a_time_is_refused(ray: StandIn, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="workers is 0; with engine='ray'"):
        Cluster(Engine("ray"), shared_path=tmp_path, n_at_once=0)


def test_losses_are_unseen(ray: StandIn, lines: Path, tmp_path: Path) -> None:
    write(lines, {"e/breaks.txt": "eight !", "e/kills.txt": "nine kill"})
    ray.fates = [NodeDied("gone"), Crashed("signal 9"), "silence"]
    here = convert(lines, tmp_path / "here", workers=1)
    there = convert(lines, tmp_path / "there", workers=None, engine="ray")
    assert there.inputs == here.inputs
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_a_cluster_goes_on(ray: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, out = install(tmp_path, monkeypatch), tmp_path / "out"
    convert(lines, tmp_path / "whole")

    def interrupt(state: Any) -> None:
        if state.name == "c/4.txt":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(lines, out, progress=interrupt)
    begun: list[str] = []

    def run(next_unit: Callable[[], Unit | None], *given: Any) -> Iterator[Any]:
        def noted() -> Unit | None:
            if (unit := next_unit()) is not None:
                begun.append(unit.inputs[0].name)
            return unit

        return run_in_workers(noted, *given)

    monkeypatch.setattr(scheduler, "run_in_workers", run)
    convert(lines, out, workers=None, engine="ray", resume=True)
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(begun) == ["b/readme", "d/5.txt"]


def test_maintenance(ray: StandIn, lines: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for out in (here, there):
        convert(lines, out)
    ray.fates = [NodeDied("gone"), Crashed("signal 9"), "silence"]
    length = Array("int64")
    compute_stats(here)
    compute_stats(there, engine="ray")
    add_column(here, "length", length, lambda sample: len(sample["text"]))
    ray.fates = [NodeDied("gone"), Crashed("signal 9"), "silence"]
    add_column(there, "length", length, lambda sample: len(sample["text"]), engine="ray", gpus=0.5)
    assert ray.options["num_gpus"] == 0.5
    assert contents(there) == contents(here)
    (shard, *_) = sorted(there.glob("*.shard"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert verify_dataset(there, engine="ray") == verify_dataset(there, workers=0)


@pytest.mark.parametrize("name", ["top.txt", "deleted.txt"])
def test_a_machine_that_does_not_see_an_input_is_refused_unless_the_input_was_deleted(
    ray: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    lines, out = install(tmp_path, monkeypatch), tmp_path / "out"
    monkeypatch.setattr(scheduler, "_first_invisible", lambda _: str(lines / name))
    if name == "deleted.txt":
        assert convert(lines, out, workers=None, engine="ray").n_samples == 7
    else:
        with pytest.raises(UnsupportedEnvironment, match=r"cannot see .*/top\.txt: the source"):
            convert(lines, out, workers=None, engine="ray")
        assert not out.exists()
