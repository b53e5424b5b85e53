"""URLs of datasets, and the options for reading them from an object store.

Options may hold secrets: they are passed to obstore, and never written, printed or quoted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from shardio.errors import InvalidArgument
from shardio.storage.file_access import Access

AZURE: Final = ("az", "azure", "adl", "abfs", "abfss")
SCHEMES: Final = ("s3", "s3a", "gs", *AZURE, "http", "https")
_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
CACHE_VARIABLE: Final = "SHARDIO_CACHE"
"""The environment variable that names the folder of the cache."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options for reading a dataset from an object store. Immutable; its repr omits `options`.

    Args:
        cache: the folder to download shards to; None for the user's default.
        cache_bytes: the limit of the cache in bytes; None for nine tenths of the free space.
        options: arguments of `obstore.store.from_url`, and `deadline_s`.
        whole: True to download whole shards before reading from them.
        n_readers: the number of processes or threads that read the dataset at the same time.
        access: the access method of workers for downloaded shards.
    """

    cache: str | None = None
    cache_bytes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    whole: bool = False
    n_readers: int = 1
    access: Access = "auto"

    @classmethod
    def of(
        cls,
        cache: str | os.PathLike[str] | None,
        cache_bytes: int | None,
        storage_options: Mapping[str, Any] | None,
        access: Access = "auto",
    ) -> RemoteOptions:
        """Validate the options that a user gave.

        Raises:
            InvalidArgument: names the option, the accepted values and the value found.
        """
        if cache_bytes is not None and (type(cache_bytes) is not int or cache_bytes < 1):
            raise InvalidArgument(f"cache_bytes must be an int from 1 up; found {cache_bytes!r}")
        if storage_options is not None and not isinstance(storage_options, Mapping):
            kind = type(storage_options).__name__  # not the value: it may hold a secret
            raise InvalidArgument(f"storage_options must be a dict; found a {kind}")
        options = dict(storage_options or {})
        client = options.get("client_options", {})
        if not all(isinstance(name, str) for name in options) or not isinstance(client, Mapping):
            raise InvalidArgument(
                "storage_options must be a dict with string keys, and its client_options a dict"
            )
        cache_folder = None if cache is None else os.path.abspath(os.path.expanduser(cache))
        return cls(cache_folder, cache_bytes, options, access=access)

    @property
    def for_workers(self) -> RemoteOptions:
        """The same options for workers, which download whole shards."""
        return replace(self, whole=True)

    @property
    def cache_folder(self) -> str:
        """The absolute path of the cache: `cache`, or the default."""
        if self.cache is not None:
            return self.cache
        if named := os.environ.get(CACHE_VARIABLE):
            return os.path.abspath(os.path.expanduser(named))
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return os.path.abspath(os.path.join(home, "shardio"))


def is_url(place: str) -> bool:
    """Return True for the URL of an object store, False for a path or a `file://` URL."""
    found = _SCHEME.match(place)
    return found is not None and found[1].lower() != "file"


def local_path(place: str) -> str:
    """Return the path of a `file://` URL; return anything else unchanged."""
    if not place.lower().startswith("file://"):
        return place
    parts = urlsplit(place)
    if parts.netloc not in ("", "localhost"):
        raise InvalidArgument(f"{place}: names another machine; a file:// URL must be local")
    from urllib.request import url2pathname

    return url2pathname(parts.path)


def validate_url(url: str) -> str:
    """Return the URL of a folder in an object store without trailing slashes.

    Raises:
        InvalidArgument: the scheme is unknown, the bucket is missing, or the URL has a user, a
            password, a query or a fragment, which may be secret.
    """
    parts = urlsplit(url)
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    if parts.scheme.lower() not in SCHEMES:
        raise InvalidArgument(
            f"{shown}: a dataset is a folder, or a URL that begins with one of "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidArgument(
            f"{shown}: has a user, a query or a fragment, which may be secret: give credentials by "
            "storage_options, or by the environment"
        )
    if not parts.netloc:
        raise InvalidArgument(f"{shown}: names no bucket or host")
    return url.rstrip("/")
