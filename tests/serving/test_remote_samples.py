"""MultiLoader with addresses: every server has a part of each epoch."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument, MultiLoader
from shardio.dataset.manifest import load, publish_next
from shardio.errors import BatchTimeout, ClosedError, ServerUnreachable
from shardio.serving import Server
from shardio.serving.client.connection import ConnectionLost, Servers
from shardio.serving.client.remote_loader import RemoteLoader
from tests.loading import PATIENCE_S, TWO_FIELDS, two_fields, write_dataset
from tests.serving.served import Gate, refuse_sample_7, serving
from tests.shards import EVERY_FIELD, same_in_batch


@pytest.fixture(scope="module")
def second(path: str) -> Iterator[Server]:
    with serving(path) as made:
        yield made


def _labels(samples: Any) -> list[int]:
    return [int(sample["label"]) for sample in samples]


def test_every_sample_comes_once_as_stored(path: str, server: Server, second: Server) -> None:
    with MultiLoader(address=[server.address, second.address], options={"batch_size": 4}) as far:
        samples = list(far)
    assert sorted(_labels(samples)) == list(range(30))
    stored = shardio.open(path)
    for sample in samples:
        expected = stored.schema.flatten(stored[int(sample["label"])])
        assert all(same_in_batch(sample[name], expected[name]) for name in EVERY_FIELD)


def test_every_iteration_is_the_next_epoch(server: Server, second: Server) -> None:
    options = {"shuffle": True, "fields": ["label"], "batch_size": 2}
    with MultiLoader(address=server.address, options=options) as one:
        epochs = [_labels(one) for _ in range(2)]
        next(iter(one))
        one.kill()
        last = _labels(one)
    assert [sorted(each) for each in (*epochs, last)] == [list(range(30))] * 3
    assert len({tuple(each) for each in (*epochs, last)}) == 3


def test_kill_ends_the_wait_for_a_server_that_is_away(path: str) -> None:
    with serving(path) as server:
        far = MultiLoader(address=server.address)
        list(far)
    record_loss, is_waiting = Servers.record_loss, threading.Event()

    def note(self: Servers, lost: ConnectionLost) -> None:
        is_waiting.set()
        record_loss(self, lost)

    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Servers, "record_loss", note)
        waiting = pool.submit(list, far)
        assert is_waiting.wait(PATIENCE_S)
        far.kill()
        with pytest.raises(ClosedError):
            waiting.result()


def test_an_iteration_that_goes_on_beside_the_next_is_over(server: Server) -> None:
    with MultiLoader(address=server.address, options={"batch_size": 2}) as far:
        first = iter(far)
        next(first)
        second = iter(far)
        assert _labels(second) == list(range(30))
        with pytest.raises(ClosedError):
            list(first)
        third = iter(far)
        next(third)
        far.kill()
        with pytest.raises(ClosedError):
            list(third)


def test_threads_share_an_iteration(server: Server, second: Server) -> None:
    options = {"batch_size": 2, "fields": ["label"]}
    with MultiLoader(address=[server.address, second.address], options=options) as far:
        samples = iter(far)
        with ThreadPoolExecutor(3) as pool:
            parts = list(pool.map(lambda _: _labels(samples), range(3)))
    assert sorted(label for part in parts for label in part) == list(range(30))


def test_kill_in_one_thread_ends_the_wait_of_another(path: str) -> None:
    gate = Gate()
    with serving(path, transform=gate) as server, ThreadPoolExecutor(1) as pool:
        far = MultiLoader(address=server.address, options={"batch_size": 1, "prefetch": 0})
        samples = iter(far)
        next(samples)
        gate.opened.clear()
        rest = pool.submit(_labels, samples)
        far.kill()
        with pytest.raises(ClosedError):
            rest.result()
        gate.opened.set()


def test_a_server_that_returns_gives_its_part_once(path: str, server: Server) -> None:
    with serving(path) as lost:
        address = lost.address
        options = {"batch_size": 1, "prefetch": 0, "fields": ["label"]}
        far = MultiLoader(address=[server.address, address], options=options)
        samples = iter(far)
        found = [next(samples) for _ in range(6)]
    with far, serving(path, bind=address):
        assert sorted(_labels([*found, *samples])) == list(range(30))


def test_samples_that_fail_may_be_skipped(path: str) -> None:
    with serving(path, transform=refuse_sample_7) as server:
        with MultiLoader(address=server.address, on_error="skip", max_skips=1) as far:
            assert _labels(far) == [i for i in range(30) if i != 7]
            assert [(skip.index, skip.item) for skip in far.skipped] == [(7, "server 0")]


def test_an_iteration_and_its_servers_are_of_one_process(server: Server) -> None:
    with MultiLoader(address=server.address, options={"batch_size": 1}) as far:
        samples = iter(far)
        next(samples)
        servers: Any = far._servers
        servers._pid = 1
        with pytest.raises(ClosedError, match="forked; start another"):
            next(samples)
        assert _labels(far) == list(range(30))
        servers._pid = os.getpid()
        assert _labels(samples) == list(range(1, 30))
        servers.close()


def test_a_server_that_is_lost_for_ever_is_named(path: str, server: Server) -> None:
    with serving(path) as lost:
        address = lost.address
        options = {"batch_size": 1, "prefetch": 0, "fields": ["label"]}
        far = MultiLoader(address=[server.address, address], options=options)
        samples = iter(far)
        found = [next(samples) for _ in range(6)]
    with far, pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.serving.client.remote_samples.RemoteSamples._wait", lambda *_: None)
        patch.setattr("shardio.serving.client.connection.Servers.wait", lambda *_: True)
        far._servers._loaders[1]._stream._servers._timeout_s = 0.0  # type: ignore[union-attr]
        with pytest.raises(ServerUnreachable) as caught:
            found += samples
    (note,) = caught.value.__notes__
    assert re.match(rf"at server 1 \({address}\): \d of 15 batches received", note)
    assert len(set(_labels(found))) == len(found)


def test_servers_in_different_states_of_a_dataset_share_no_epoch(tmp_path: Path) -> None:
    folder = tmp_path / "grows"
    path = write_dataset(folder, 6, schema=TWO_FIELDS, samples=two_fields(6))
    with serving(path) as first, serving(path) as second:
        addresses = [first.address, second.address]
        with MultiLoader(address=addresses) as far:
            assert len(list(far)) == 6
            publish_next(folder, load(folder), classes=("new",))
            other = RemoteLoader(second.address, 4, output="numpy")
            loaders = far._servers._loaders  # type: ignore[union-attr]
            kept, loaders[1] = loaders[1], other
            with pytest.raises(InvalidArgument, match="serves generation 2 .* generation 1"):
                iter(far)
            kept.close()
            far.kill()
            assert len(list(far)) == 6


def test_servers_of_different_datasets_share_no_epoch(server: Server, other_path: str) -> None:
    with serving(other_path) as other:
        with pytest.raises(InvalidArgument, match="serves the dataset of lineage"):
            iter(MultiLoader(address=[server.address, other.address]))


def test_a_server_that_makes_other_batches_has_no_samples(path: str) -> None:
    with serving(path, batch_transform=dict) as server:
        with pytest.raises(InvalidArgument, match="MultiLoader needs samples"):
            iter(MultiLoader(address=server.address))


def test_verbose_names_servers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with MultiLoader(address=server.address, verbose=True) as far:
        list(far)
    assert "server 0 has sent all of its share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": range(3)}, "leave dataset out"),
        ({"address": []}, "a list of different addresses"),
        ({"address": 5}, "tcp://host:port"),
        ({"options": {"rank": 1}}, "decides rank itself"),
        ({"options": {"output": "torch"}}, "decides output itself"),
        ({"options": {"fields": ["no"]}}, "fields must be"),
    ],
)
def test_wrong_arguments_are_refused(server: Server, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        iter(MultiLoader(**{"address": server.address, **arguments}))


@pytest.mark.parametrize("more", [{"keys": "x"}, {"options": {}}])
def test_keys_and_options_are_for_an_address(more: dict[str, Any]) -> None:
    said = "keys and options are for a server: pass its address as address="
    with pytest.raises(InvalidArgument, match=said):
        MultiLoader(range(3), **more)


def test_missing_samples_are_overdue(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with MultiLoader(address=server.address, timeout_s=0.2, options={"batch_size": 1}) as far:
        samples = iter(far)
        next(samples)
        monkeypatch.setattr("shardio.serving.client.batch_stream.Stream.take", lambda *_: None)
        with pytest.raises(BatchTimeout, match=r"0.2 s; server 0 .* 1 of 30 batches received"):
            list(samples)
