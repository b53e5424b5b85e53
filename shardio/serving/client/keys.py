"""The keys of CURVE: files of one line each, 40 characters of Z85.

FOLDER/server.secret           stays with the server
FOLDER/server.public
FOLDER/clients/NAME.public     whom it serves
FOLDER/NAME/server.public      this folder is for the client: its key, and whom it trusts
FOLDER/NAME/client.secret
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardio._workers.tasks.messages import zeromq
from shardio.errors import InvalidArgument

_FORM: Final = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_DIGITS: Final = (
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VARIABLE: Final = "SHARDIO_KEYS"
_MOST_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The key of a server, and the folder of the clients that it serves."""

    secret: bytes = field(repr=False)
    clients: Path

    def knows(self, public: bytes) -> bool:
        """Return True if a client has this key; the folder is read each time, so keys may change.

        A file that is not a key, such as one just being written, is ignored.

        Raises:
            OSError: neither the folder nor its files can be read, as when no more files may be
                open.
        """
        for name in os.listdir(self.clients):
            if name.endswith(".public"):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                    with open(self.clients / name, "rb") as file:
                        key = file.read(_MOST_BYTES).strip()
                    if key == public and _FORM.fullmatch(key):
                        return True
        return False


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The key of a client, and that of the server that it trusts."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)


def make_keys(folder: str | os.PathLike[str], client: str = "client") -> Path:
    """Make the keys of a client, and those of the server if there are none; returns its folder.

    Files of secrets are for this user alone.

    Raises:
        InvalidArgument: there are keys of that name, or it is no name.
        UnsupportedEnvironment: pyzmq is missing.
    """
    zmq, place = zeromq("a server"), Path(folder)
    if not _NAME.fullmatch(client) or client == "clients":
        raise InvalidArgument(
            f"a client's name has letters, digits, _, . and -, and is not 'clients'; "
            f"found {client!r}"
        )
    own = place / client
    listed = place / "clients" / f"{client}.public"
    if own.exists() or listed.exists():
        raise InvalidArgument(f"{own}: there are keys of this name; take another, or remove them")
    listed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (place / "server.secret").exists():
        public, secret = zmq.curve_keypair()
        _write(place / "server.secret", secret, 0o600)
        _write(place / "server.public", public, 0o644)
    public, secret = zmq.curve_keypair()
    own.mkdir(mode=0o700)
    _write(own / "client.secret", secret, 0o600)
    _write(own / "server.public", _read(place / "server.public"), 0o644)
    _write(listed, public, 0o644)  # last: the client is complete by then
    return own


def server_keys(folder: str | os.PathLike[str]) -> ServerKeys:
    """Read the keys of a server.

    Raises:
        InvalidArgument: a file is missing, is no key, or is a secret that others may read.
    """
    place = Path(folder)
    clients = place / "clients"
    if not clients.is_dir():
        raise InvalidArgument(
            f"{clients}: there is no such folder of clients' keys: "
            f"shardio serve --make-keys {place}"
        )
    for path in clients.glob("*.public"):
        _read(path)
    return ServerKeys(_read_secret(place / "server.secret"), clients)


def client_keys(folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """Read the keys of a client, from where SHARDIO_KEYS says if no folder is given; or None.

    Raises:
        InvalidArgument: a file is missing, is no key, or is a secret that others may read.
        UnsupportedEnvironment: pyzmq is missing.
    """
    found = os.environ.get(_VARIABLE) if folder is None else folder
    if not found:
        return None
    place = Path(found)
    secret = _read_secret(place / "client.secret")
    return ClientKeys(
        _read(place / "server.public"), zeromq("a client").curve_public(secret), secret
    )


def z85(key: bytes) -> bytes:
    """Encode a key of 32 bytes as its files have it: 4 bytes are 5 digits of base 85."""
    found = bytearray()
    for (word,) in struct.iter_unpack(">I", key):
        found += bytes(_DIGITS[word // 85**place % 85] for place in (4, 3, 2, 1, 0))
    return bytes(found)


def _write(path: Path, key: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.write(key + b"\n")


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InvalidArgument(
            f"{path}: others may read this secret, its mode is {mode:o}: chmod 600 {path}"
        )
    return key


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            key = file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise InvalidArgument(
            f"{path}: this key cannot be read ({error.strerror}): "
            "`shardio serve --make-keys` makes a server's keys, and a folder of them for a client"
        ) from error
    if not _FORM.fullmatch(key):
        raise InvalidArgument(f"{path}: expected a key, 40 characters of Z85")
    return key
