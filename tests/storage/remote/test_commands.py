"""The command line on datasets in object stores."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

import shardio
from shardio.errors import DatasetNotFound
from shardio.storage.remote import object_store
from shardio_tools import cli
from shardio_tools.arguments import refuse_urls
from tests.loading import TWO_FIELDS, two_fields, write_dataset
from tests.serving.served import serving
from tests.storage.remote.scene import Scene
from tests.tools.view.served import POST, finished, viewing


def test_inspect_by_ranges(told: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "set", 400, 2, TWO_FIELDS, two_fields(400))
    url = told.put_dataset(tmp_path / "set", "inspected")
    assert cli.main(["inspect", url, "--sample", "150", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sample"]["fields"]["label"]["min"] == 150
    assert [shard["samples"] for shard in facts["shards"]] == [200, 200]
    names = [shard["name"] for shard in facts["shards"]]
    assert told.proxy.n_bytes[names[0]] < facts["shards"][0]["bytes"] / 2
    assert told.proxy.requests[names[1]] == 0
    assert cli.main(["inspect", url]) == 0
    out = capsys.readouterr().out
    assert "  samples  400\n" in out and " in 2 shards\n" in out


def test_a_command_names_the_variable_of_the_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDIO_DEADLINE_S", "0.2")
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/set"
        assert cli.main(["inspect", url]) == 3
    assert "check the address, or set SHARDIO_DEADLINE_S=… or" in capsys.readouterr().err


def test_view_by_ranges(told: Scene, tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", 400, 2, TWO_FIELDS, two_fields(400))
    url = told.put_dataset(tmp_path / "set", "viewed")
    with viewing(url) as client:
        facts = client.get("/api/dataset").json()
        assert (facts["n_samples"], facts["remote"], facts["path"]) == (400, True, url)
        assert client.get("/api/statistics").json()["state"] == "none"
        names = [path.name for path in sorted((tmp_path / "set").glob("*.shard"))]
        assert sum(told.proxy.requests[name] for name in names) == 0
        (row,) = client.get("/api/rows?start=150&count=1").json()["rows"]
        assert row["row"] == 150 and row["damaged"] is None
        assert client.get("/api/sample/150").json()["damaged"] is None
        assert client.get("/thumbnail/150/image").status_code == 200
        assert 0 < told.proxy.n_bytes[names[0]] < (tmp_path / "set" / names[0]).stat().st_size / 2
        assert told.proxy.requests[names[1]] == 0
        refused = client.post("/api/verification", headers=POST, json={})
        assert refused.status_code == 400 and "download it" in refused.json()["error"]
        client.post("/api/statistics", headers=POST, json={})
        assert finished(client, "/api/statistics")["fields"]["label"]["count"] == 400


def test_a_url_that_ends_in_the_name_of_a_subset(
    told: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "set", 10, 1, TWO_FIELDS, two_fields(10))
    shardio.maintenance.split(tmp_path / "set", {"train": 0.5, "val": 0.5})
    url = told.put_dataset(tmp_path / "set", "divided")
    assert cli.main(["inspect", f"{url}/train"]) == 2
    said = f"{url}/train: 'train' is a subset of a dataset: write {url} --subset train\n"
    assert said in capsys.readouterr().err


def test_python_names_the_subset_at_the_end_of_a_url(told: Scene, tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", 10, 1, TWO_FIELDS, two_fields(10))
    shardio.maintenance.split(tmp_path / "set", {"train": 0.5, "val": 0.5})
    url = told.put_dataset(tmp_path / "set", "in-two")
    advice = re.escape(
        f"/train: holds no dataset.json: write shardio.open({url!r}, subset='train')"
    )
    for path in (f"{url}/train", f"{url}/train/"):
        with pytest.raises(DatasetNotFound, match=advice):
            shardio.open(path)
    with pytest.raises(DatasetNotFound, match=advice):
        shardio.ShardLoader(f"{url}/train", 2)
    with pytest.raises(DatasetNotFound, match="/trian: holds no dataset.json: not a dataset"):
        shardio.open(f"{url}/trian")


@pytest.mark.filterwarnings("default")
def test_a_command_answers_soon_if_no_server_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_CONNECT_DEADLINE_S", 0.5)
    monkeypatch.setattr(object_store, "_NOTE_AFTER_S", -1)
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/set"
        assert cli.main(["inspect", url]) == 3
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith(f"shardio: warning: {url}: no connection (Connection refused); trying")
    assert error.startswith(f"shardio: {url}/dataset.json: no connection (Connection refused), aft")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["verify", "s3://bucket/set"], 2, "shardio verify needs a local folder: copy"),
        (["merge", "s3://bucket/set", "here/"], 2, "shardio merge needs a local folder: copy"),
        (["inspect", "s3://bucket/nowhere"], 2, "holds no dataset.json"),
        (["inspect", "s3://bucket/set/a.shard"], 2, "shardio inspect s3://bucket/set\n"),
        (["inspect", "ftp://host/set"], 2, "ftp://host/set: a dataset is a folder, or a URL"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    told: Scene, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert cli.main(arguments) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_dataset_in_a_store_is_served(told: Scene, tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", 40, 2, TWO_FIELDS, two_fields(40))
    url = told.put_dataset(tmp_path / "set", "served")
    with serving(url) as server, shardio.connect(server.address, 16, output="numpy") as loader:
        labels = [label for batch in loader for label in batch["label"].tolist()]
    assert labels == list(range(40))


@pytest.mark.parametrize("option", ["--address", "--bind"])
def test_where_others_are_reached_is_no_dataset(option: str) -> None:
    others = {"--address": ["convert", "SRC", "OUT"], "--bind": ["serve", "OUT"]}[option]
    options = cli.parser().parse_args([*others, option, "tcp://head:10001"])
    refuse_urls(options)
    assert "tcp://head:10001" in vars(options).values(), "the address is an argument"
