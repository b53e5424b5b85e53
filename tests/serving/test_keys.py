from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from shardio import InvalidArgument
from shardio._workers.tasks.zeromq import zeromq
from shardio.serving.client.connection import client_keys, make_keys, server_keys
from tests.serving.served import few_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_secrets_are_for_their_owner_alone_and_are_not_shown(folder: Path) -> None:
    secrets = [folder / "server.secret", folder / "client" / "client.secret"]
    assert [path.stat().st_mode & 0o777 for path in secrets] == [0o600, 0o600]
    assert not (folder / "client" / "server.secret").exists()
    server, client = server_keys(folder), client_keys(folder / "client")
    assert client is not None
    for secret in (server.secret, client.secret):
        assert secret.decode() not in repr(server) + repr(client)


def test_another_client_is_known_to_the_same_server_at_once(folder: Path) -> None:
    server = server_keys(folder)
    second = client_keys(make_keys(folder, "second"))
    assert second is not None and second.public == zeromq().curve_public(second.secret)
    assert second.server == zeromq().curve_public(server.secret)
    assert server.knows(second.public) and not server.knows(second.server)
    (folder / "clients" / "second.public").unlink()
    assert not server.knows(second.public)


def test_a_file_that_is_not_written_yet_lets_nobody_in_and_nobody_out(folder: Path) -> None:
    server, client = server_keys(folder), client_keys(folder / "client")
    assert client is not None
    (folder / "clients" / "a.public").write_text("")
    (folder / "clients" / "b.public").symlink_to("nowhere")
    assert server.knows(client.public) and not server.knows(b"")


def test_where_keys_cannot_be_read_nobody_is_said_to_be_unknown(folder: Path) -> None:
    server = server_keys(folder)
    with few_files(0), pytest.raises(OSError, match="Too many open files"):
        server.knows(b"")


@pytest.mark.parametrize("name", ["client", "clients", "../x", ".x", ""])
def test_a_client_is_neither_made_twice_nor_outside_of_the_folder(folder: Path, name: str) -> None:
    before = sorted(folder.parent.rglob("*"))
    exists = "keys of this name exist; choose another name, or remove them"
    with pytest.raises(InvalidArgument) as caught:
        make_keys(folder, name)
    assert (exists if name == "client" else f"found {name!r}") in str(caught.value)
    assert sorted(folder.parent.rglob("*")) == before


def test_a_secret_that_others_may_read_is_refused(folder: Path) -> None:
    for path, read in (
        (folder / "server.secret", lambda: server_keys(folder)),
        (folder / "client" / "client.secret", lambda: client_keys(folder / "client")),
    ):
        os.chmod(path, 0o644)
        with pytest.raises(InvalidArgument, match=re.escape(f"chmod 600 {path}")):
            read()


def test_a_file_that_is_no_key_or_is_not_there_is_named(folder: Path) -> None:
    public = folder / "client" / "server.public"
    public.write_text("no key")
    with pytest.raises(InvalidArgument, match=f"{re.escape(str(public))}: not a key"):
        client_keys(folder / "client")
    public.unlink()
    with pytest.raises(InvalidArgument, match=f"{re.escape(str(public))}: this key cannot be read"):
        client_keys(folder / "client")
    with pytest.raises(InvalidArgument, match="--make-keys"):
        server_keys(folder / "client")


def test_the_environment_says_where_keys_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDIO_KEYS", raising=False)
    assert client_keys(None) is None
    monkeypatch.setenv("SHARDIO_KEYS", str(folder / "client"))
    assert client_keys(None) == client_keys(folder / "client") is not None
