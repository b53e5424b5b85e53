from __future__ import annotations

import io
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import InvalidArgument, ShardLoader, WeightedSampler
from shardio.errors import ClosedError, ServerUnreachable, TransformError
from shardio.serving import Server
from shardio.serving.client.connection import Link
from shardio.serving.client.remote_loader import RemoteLoader
from tests.loading import bits
from tests.serving.served import HOW, Gate, local_bits, refuse_sample_7, serving, wait_until


@pytest.fixture(scope="module")
def loader(server: Server) -> Any:
    with shardio.connect(server.address, 4, **HOW) as made:
        yield made


@pytest.fixture(autouse=True)
def from_the_start(request: pytest.FixtureRequest) -> None:
    """Reset the shared loader to the beginning of epoch 0."""
    if "loader" in request.fixturenames:
        loader = request.getfixturevalue("loader")
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 0})


def test_epochs_are_those_of_a_loader_here_bit_for_bit(path: str, loader: RemoteLoader) -> None:
    with ShardLoader(path, 4, num_workers=0, **HOW) as local:
        assert len(loader) == len(local)
        for _ in range(2):
            expected = [(bits(batch), local.state_dict()) for batch in local]
            assert [(bits(batch), loader.state_dict()) for batch in loader] == expected
            assert loader.epoch == local.epoch


def test_uploads_of_a_batch_are_announced_before_they_begin(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def wrap(array: Any, owner: object, dtype: str | None) -> Any:
        seen.append("array")
        return array

    uploads = SimpleNamespace(begin_batch=lambda: seen.append("batch"))
    adapter = SimpleNamespace(wrap=wrap, wraps_items=True, uploads=uploads)
    monkeypatch.setattr("shardio.serving.client.remote_loader.create_adapter", lambda *_: adapter)
    with shardio.connect(server.address, 4, **HOW) as loader:
        for _ in zip(range(2), loader, strict=False):
            pass
    n_arrays = seen.index("batch", 1) - 1
    assert n_arrays > 0 and seen[: 2 * n_arrays + 2] == ["batch", *["array"] * n_arrays] * 2


def test_a_state_goes_from_there_to_here_and_back(path: str, loader: RemoteLoader) -> None:
    expected = local_bits(path, 4)
    first = list(map(bits, itertools.islice(loader, 3)))
    with ShardLoader(path, 4, num_workers=0, **HOW) as local:
        local.load_state_dict(loader.state_dict())
        second = list(map(bits, itertools.islice(local, 2)))
        loader.load_state_dict(local.state_dict())
    assert first + second + list(map(bits, loader)) == expected


def test_a_state_of_something_else_is_refused_at_once(loader: RemoteLoader) -> None:
    state = loader.state_dict()
    for wrong in ({**state, "lineage": "0" * 16}, {**state, "seed": 4}, {}, None):
        with pytest.raises(InvalidArgument, match="load_state_dict"):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]
    assert loader.state_dict() == state


def test_an_iteration_left_early_is_followed_by_the_next(loader: RemoteLoader) -> None:
    left = iter(loader)
    next(left)
    assert loader.state_dict()["position"] == 4
    assert {batch.epoch for batch in loader} == {1}
    with pytest.raises(ClosedError):
        next(left)


def test_ranks_have_together_what_one_has(path: str, server: Server) -> None:
    for rank in range(2):
        place: dict[str, Any] = {"rank": rank, "world_size": 2, "tail": "short"}
        with shardio.connect(server.address, 4, **place, **HOW) as one:
            assert list(map(bits, one)) == local_bits(path, 4, **place)


def test_epochs_without_a_batch_are_warned_of_once(server: Server) -> None:
    with shardio.connect(server.address, 1000, tail="drop", **HOW) as far:
        with pytest.warns(RuntimeWarning, match="epoch 0 has no batch") as caught:
            assert list(far) == []
        assert __file__ in [each.filename for each in caught]
        assert list(far) == []


@pytest.mark.parametrize(
    "options",
    [
        {"fields": ["label", "note"], "shuffle": "blocks"},
        {"shuffle": "shards", "fields": ["label"]},
        {"sampler": [5, 3, 3, 7], "shuffle": False},
        {
            "sampler": WeightedSampler(np.arange(30) / 7, replacement=False, n_draws=9),
            "shuffle": False,
        },
        {"fields": ["points", "cloud"], "collate": {"points": "pad", "cloud": (2, None, 4)}},
        {"fields": ["points"], "collate": "ragged", "tail": "pad"},
        {"verify": "off", "tail": "drop", "fields": ["label"]},
    ],
    ids=lambda options: " ".join(f"{k}={v}" if k == "sampler" else k for k, v in options.items()),
)
def test_options_mean_the_same_there(path: str, server: Server, options: dict[str, Any]) -> None:
    with shardio.connect(server.address, 4, **{**HOW, **options}) as far:
        assert list(map(bits, far)) == local_bits(path, 4, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transform": dict}, "shardio serve --transform"),
        ({"reuse": True}, "reuse is not an option of a remote loader"),
        ({"sampler": range}, "code cannot be sent"),
        ({"collate": dict}, "code cannot be sent"),
        ({"fields": ["nothing"]}, "fields must be different names among"),
        ({"clips": "all"}, r"clips must be a dict with the arguments of dataset.clips\(frames, "),
        ({"clips": {"frame": 8}}, "clips must be a dict.*'frame'"),
        ({"pack": {}}, r"pack must be a dict with the arguments of dataset.pack\(length, "),
        ({"clips": {}, "pack": {"length": 8}}, "clips and pack are two views.* pass one"),
        ({"clips": {"frames": 8}}, "clips need a field of videos"),
        ({"tail": "other"}, "tail must be one of"),
        ({"output": "lists"}, "output must be one of"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"prefetch": -1}, "prefetch"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(server: Server, options: dict[str, Any], said: str) -> None:
    with pytest.raises(shardio.ShardioError, match=said):
        shardio.connect(server.address, 4, **{"output": "numpy", **options})


def test_what_no_message_can_say_is_refused_at_once(server: Server, loader: RemoteLoader) -> None:
    state = loader.state_dict()
    for number in (np.int64(4), float("nan")):
        with pytest.raises(InvalidArgument, match="cannot be sent to a server as JSON"):
            loader.load_state_dict({**state, "position": number})
    with pytest.raises(InvalidArgument, match="bytes of JSON; a server takes at most"):
        shardio.connect(server.address, 4, sampler=np.zeros(2_500_000, np.int64))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("batchsize", "did you mean 'batch_size'"),
        ("timeout", "write timeout_s=; None corresponds"),
        ("drop_last", 'write tail="drop"'),
        ("clip", 'write clips={"frames": …}: the server makes the view of its dataset'),
        ("windows", "a server has no view of time steps: load dataset.windows(…) with a Shard"),
        ("length", 'write pack={"length": …}: the server makes the view of its dataset'),
    ],
)
def test_an_unknown_option_is_answered(server: Server, option: str, said: str) -> None:
    options: dict[str, Any] = {option: 3}
    with pytest.raises(TypeError, match=re.escape(f"no option {option!r}: {said}")):
        shardio.connect(server.address, 4, **options)


@pytest.mark.parametrize("address", ["tcp://h:1", ["tcp://h:1", "tcp://h:2"]])
def test_a_loader_of_the_address_of_a_server_names_connect(address: Any) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"write shardio.connect({address!r}, ")):
        ShardLoader(address, 4, output="numpy")


def test_tensors_are_made_here(server: Server) -> None:
    with shardio.connect(server.address, 4, fields=["vector", "note", "bits"]) as far:
        batch = next(iter(far))
        assert type(batch["vector"]).__module__.startswith("tinygrad")
        assert str(batch["bits"].dtype) == "dtypes.bfloat16"
        assert len(batch["note"]) == 4


def test_the_bar_counts_batches_and_the_figures_add_up(loader: RemoteLoader) -> None:
    said = io.StringIO()
    with shardio.connect(loader.address, 4, **HOW) as far:
        assert len(list(far.progress(file=said))) == len(far)
        next(iter(far))
        stats = far.stats()
        far.load_state_dict(far.state_dict())
        assert far.stats().total.n_samples == 34
    assert (stats.latest.n_batches, stats.total.n_samples) == (1, 34)
    assert stats.latest.n_bytes > 4 * 6912 and stats.total.n_restarts == 0


def test_after_an_interrupt(path: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    receive = Link.receive

    def interrupted(self: Link, wait_s: float) -> Any:
        found = receive(self, wait_s)  # which is lost
        if next(calls) in (7, 20, 33):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Link, "receive", interrupted)
    n_interrupts, epochs = 0, list[list[Any]]()
    with shardio.connect(server.address, 4, **HOW) as far:
        while len(epochs) < 3:
            try:
                epochs.append(list(map(bits, far)))
            except KeyboardInterrupt:
                n_interrupts += 1
    with ShardLoader(path, 4, num_workers=0, **HOW) as local:
        every = [list(map(bits, local)) for _ in range(3 + n_interrupts)]
    assert n_interrupts == 3
    assert all(epoch in every for epoch in epochs)


def test_a_loader_that_is_let_go_of_leaves_its_server(server: Server) -> None:
    far = shardio.connect(server.address, 4, **HOW)
    batches = iter(far)
    held = next(batches)
    del far
    session = server.sessions[-1]
    next(batches)
    del batches
    wait_until(lambda: session not in server.sessions)
    assert held.n_rows == 4


def test_a_fork_can_neither_use_a_loader_nor_end_it(loader: RemoteLoader) -> None:
    before = len(loader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.serving.client.remote_loader.this_process.pid", 1)
        with pytest.raises(ClosedError, match="forked"):
            iter(loader)
    assert len(list(loader)) == before


def test_after_close_there_is_nothing_but_what_is_held(server: Server) -> None:
    far = shardio.connect(server.address, 4, **HOW)
    batches = iter(far)
    held = next(batches)
    before = bits(held)
    assert repr(far) == f"RemoteLoader({server.address!r}: batches of 4)"
    far.close()
    far.close()
    assert repr(far) == f"RemoteLoader({server.address!r}: batches of 4, closed)"
    assert bits(held) == before
    for use in (lambda: iter(far), lambda: next(batches)):
        with pytest.raises(ClosedError):
            use()


def test_close_in_one_thread_ends_the_wait_of_another(path: str) -> None:
    gate = Gate()
    with serving(path, transform=gate) as server, ThreadPoolExecutor(1) as pool:
        far = shardio.connect(server.address, 1, prefetch=0, **HOW)
        batches = iter(far)
        next(batches)
        gate.opened.clear()
        rest = pool.submit(list, batches)
        far.close()
        with pytest.raises(ClosedError):
            rest.result()
        gate.opened.set()


def test_a_transform_runs_there_and_its_errors_arrive(path: str) -> None:
    with serving(path, transform=refuse_sample_7) as server:
        options: dict[str, Any] = {"output": "numpy", "fields": ["label"]}
        with shardio.connect(server.address, 5, **options) as far:
            batches = iter(far)
            assert next(batches)["label"].tolist() == [0, 1, 2, 3, 4]
            with pytest.raises(TransformError, match="seven"):
                next(batches)
            assert far.state_dict()["position"] == 5
        with shardio.connect(server.address, 5, on_error="skip", max_skips=1, **options) as far:
            found = list(far)
        assert [skip.index for batch in found for skip in batch.skipped] == [7]
        assert int(sum(batch.valid.sum() for batch in found)) == 29


def test_where_nobody_listens_it_says_so_in_time() -> None:
    with pytest.raises(ServerUnreachable, match=r"tcp://127\.0\.0\.1:1: no server listens"):
        shardio.connect("tcp://127.0.0.1:1", 4, output="numpy", timeout_s=0.1)


def test_another_machine_is_not_asked_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDIO_KEYS", raising=False)
    with pytest.raises(InvalidArgument, match="connections to other machines need keys"):
        shardio.connect("tcp://192.0.2.1:5555", 4, output="numpy")
