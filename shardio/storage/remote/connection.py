"""Connections to object stores: URLs, options, opening a store, and conversion of exceptions.

The options may contain secrets. They are passed to obstore, but are never written to a file,
printed or quoted in a message. obstore is imported on first use.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

from shardio.errors import (
    InvalidArgument,
    ShardChanged,
    ShardNotFound,
    StoreAccessDenied,
    UnsupportedEnvironment,
    import_extra,
)

AZURE: Final = ("az", "azure", "adl", "abfs", "abfss")
SCHEMES: Final = ("s3", "s3a", "gs", *AZURE, "http", "https")
_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
_CLIENT_OPTIONS: Final = re.compile(
    "allow_http|allow_invalid_certificates|http[12]_.*|pool_.*|proxy_.*|(connect_|read_)?timeout|"
    "default_(content_type|headers)|randomize_addresses|root_certificate|user_agent"
)
"""The names of options that obstore panics at unless they are in `client_options`."""
CACHE_VARIABLE: Final = "SHARDIO_CACHE"
"""The environment variable that names the folder of the cache."""

DEADLINE_S: Final = 120.0
"""The default limit on the time that a call may take without receiving a byte."""
DEADLINE_VARIABLE: Final = "SHARDIO_DEADLINE_S"
"""The environment variable with another limit, in seconds."""
DEADLINE_HINT: Final = f"{DEADLINE_VARIABLE}=… or storage_options={{'deadline_s': …}}"


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options for reading a dataset from an object store. Immutable; its repr omits `options`.

    Args:
        cache: the folder to download shards to; None for the user's default.
        cache_bytes: the limit of the cache; None for nine tenths of the space that is free or used
            by the cache.
        options: arguments of `obstore.store.from_url`, and `deadline_s`.
        whole_shards: True to download whole shards before reading from them.
        n_readers: the number of processes or threads that read the dataset at the same time.
    """

    cache: str | None = None
    cache_bytes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    whole_shards: bool = False
    n_readers: int = 1

    @classmethod
    def of(
        cls,
        cache: str | os.PathLike[str] | None,
        cache_bytes: int | None,
        storage_options: Mapping[str, Any] | None,
    ) -> RemoteOptions:
        """Return the options that a user has given; raise InvalidArgument for an invalid option."""
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
        if cache is not None and not isinstance(cache, str | os.PathLike):
            raise InvalidArgument(f"cache must be the path of a folder; found {cache!r:.80}")
        cache_folder = None if cache is None else os.path.abspath(os.path.expanduser(cache))
        return cls(cache_folder, cache_bytes, options)

    def for_main_process(self, n_workers: int) -> RemoteOptions:
        """Return the options for a loader's main process; without workers, it downloads shards."""
        return replace(self, whole_shards=not n_workers, n_readers=max(1, n_workers))

    @property
    def for_workers(self) -> RemoteOptions:
        """The options for workers, which download whole shards."""
        return replace(self, whole_shards=True)

    @property
    def for_reopening(self) -> RemoteOptions:
        """The options to use once the server has answered: connecting has the same deadline."""
        options = dict(self.options)
        given_s = pop_deadline(options)
        options["deadline_s"] = DEADLINE_S if given_s is None else given_s
        return replace(self, options=options)

    @property
    def cache_folder(self) -> str:
        """The absolute path of the folder of the cache: `cache`, or the default."""
        if self.cache is not None:
            return self.cache
        if named := os.environ.get(CACHE_VARIABLE):
            return os.path.abspath(os.path.expanduser(named))
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return os.path.abspath(os.path.join(home, "shardio"))


def is_url(place: str) -> bool:
    """Return True for a URL, False for a path."""
    return _SCHEME.match(place) is not None


def pop_deadline(options: dict[str, Any]) -> float | None:
    """Remove `deadline_s` from options; return its value, or else that of SHARDIO_DEADLINE_S.

    Return None if neither is set. Raise InvalidArgument unless the value is a number above 0.
    """
    name, given = "storage_options['deadline_s']", options.pop("deadline_s", None)
    if given is None and (text := os.environ.get(DEADLINE_VARIABLE)):
        name, given = DEADLINE_VARIABLE, text
        with contextlib.suppress(ValueError):
            given = float(text)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise InvalidArgument(f"{name} must be a number of seconds above 0; found {given!r}")
    return float(given)


def validate_url(url: str) -> str:
    """Return the URL of a folder in an object store without trailing slashes.

    Raises InvalidArgument if the URL is invalid, or has a user, a query or a fragment, which may be
    secret.
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
            f"{shown}: has a user, a query or a fragment, which may be secret: pass credentials in "
            "storage_options, or in environment variables"
        )
    if not parts.netloc:
        raise InvalidArgument(f"{shown}: names no bucket or host")
    return url.rstrip("/")


_MAX_MESSAGE_CHARACTERS: Final = 300
_SECRETS: Final = ("key", "token", "secret", "password", "credential", "authorization", "sas")
_DENIED: Final = re.compile(
    r"ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthorizationHeader"
    r"|AccessDenied|AuthenticationFailed|RequestTimeTooSkewed|InvalidClientTokenId|\b40[13]\b"
)

_RANGE_BEYOND_END: Final = re.compile(r"^InvalidRange\b|status code: 416\b")

_CONNECT_ERROR: Final = re.compile(r"kind: Connect,|\blegacy::Error\(\s*Connect,")
"""Matches the debugging part of obstore's messages if no connection was made; a connection attempt
that times out has the kind Timeout, like a response that does, but contains a Connect error."""
_CONNECT_CAUSES: Final = (
    (r'\b(?:message|error): "([^"]+)"', r"\1"),
    (r"\bTimedOut\b", "timed out"),
    (r"\bInvalidContentType\b", "the server does not use TLS: write http://"),
    (r"\bInvalidCertificate\b", "the TLS certificate of the server is invalid or not trusted"),
    (r"", "unknown cause"),
)
"""Patterns for the debugging part of obstore's messages, and the cause that each indicates."""


class TransientError(Exception):
    """A failure after which another attempt may succeed."""


class NoConnection(TransientError):
    """The server could not be reached: it is silent, refuses connections, or has no address."""


@contextlib.contextmanager
def map_obstore_errors(url: str, name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Convert the exceptions that obstore raises in the block to exceptions of shardio.

    The messages name the object `name` below `url`. Secret values of `options` are redacted. After
    a TransientError, another attempt may succeed.
    """
    try:
        yield
    except ShardNotFound:
        raise
    except Exception as error:
        is_missing = isinstance(error, FileNotFoundError)
        if is_missing or type(error).__module__.startswith("obstore"):
            raise _to_shardio_error(url, name, error, options) from None
        raise


def replaced_error(url: str, name: str) -> ShardChanged:
    """Return the error for an object that was replaced while it was read."""
    what = "the object was replaced by another one while it was read"
    return ShardChanged(what, code="replaced", path=f"{url}/{name}")


def _to_shardio_error(
    url: str, name: str, error: Exception, options: Mapping[str, Any]
) -> Exception:
    object_url, kind = f"{url}/{name}", type(error).__name__
    if isinstance(error, FileNotFoundError):
        return ShardNotFound(f"{object_url}: there is no such object in the store")
    if kind == "AlreadyExistsError":
        return FileExistsError(object_url)
    if kind in ("PreconditionError", "NotModifiedError"):
        return replaced_error(url, name)
    words = short_message(error, options)
    if _is_denied(error):
        return StoreAccessDenied(
            f"{object_url}: access denied: {words}; renew or correct the credentials "
            "(environment, storage_options), or ask for permission"
        )
    if re.search("NoSuchBucket|ContainerNotFound", words):
        return InvalidArgument(f"{object_url}: there is no such bucket: {words}; create it first")
    if _RANGE_BEYOND_END.search(words):
        return ShardChanged(
            "the object ends before the requested range: it is empty, or was replaced by a shorter "
            "one; publish it again, or reopen the dataset",
            code="file_size",
            path=object_url,
        )
    if "Header missing" in words:  # permanent, because the server always omits the header
        return InvalidArgument(
            f"{object_url}: {words}: the server omits required headers, as with chunked transfers; "
            "copy the dataset to a folder"
        )
    kinds = ("NotSupportedError", "InvalidPathError", "UnknownConfigurationKeyError")
    if kind in kinds or "builder error" in words:  # no request was sent
        hint = "; copy the dataset to a folder" if kind == kinds[0] else ""
        return InvalidArgument(f"{object_url}: {words}{hint}")
    if _CONNECT_ERROR.search(str(error)):
        return NoConnection(_connect_cause(words, str(error)))
    return TransientError(words)


def _connect_cause(words: str, details: str) -> str:
    matches = ((re.search(pattern, details), text) for pattern, text in _CONNECT_CAUSES)
    cause = next(found.expand(text) for found, text in matches if found)
    # Without credentials, obstore asks the metadata server of a cloud machine for them.
    hint = "no credentials are set, and " if "://169.254." in words else ""
    return f"{hint}no connection ({cause})"


def short_message(error: BaseException, options: Mapping[str, Any]) -> str:
    """Return the message of an exception of obstore as one line in which secrets are redacted."""
    text = str(error)
    code, message = (re.search(f"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code is not None:
        text = f"{code[1]}: {message[1]}" if message is not None else code[1]
    text = text.partition("\n\nDebug source")[0]
    text = re.sub(r"://[^/\s]*@", "://…@", text)
    text = " ".join(re.sub(r"\?[^\s\"'>)]*", "", text).split())
    for secret in _secret_values(options):
        text = text.replace(secret, "…")
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else f"{text[:_MAX_MESSAGE_CHARACTERS]}…"


def _is_denied(error: BaseException) -> bool:
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return True
    text = str(error)
    found = re.search("<Code>([^<]*)</Code>", text)
    status = re.search(r"status(?: code)?:? *(\d\d\d)[^\n]*", text, re.IGNORECASE)
    shown = found[1] if found is not None else status[0] if status is not None else ""
    return _DENIED.search(shown) is not None


def _secret_values(options: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += _secret_values(value)
        elif isinstance(value, str) and any(part in name.lower() for part in _SECRETS):
            found.append(value)
    return [each for each in found if len(each) > 3]


REQUEST_TIMEOUT_S: Final = 30
"""The time after which a request fails and is sent again. A request for 8 MiB thus needs at least
280 kB/s."""
CONNECT_TIMEOUT_S: Final = 5
"""The time after which an attempt to connect fails."""
_ENDPOINTS: Final = (
    *("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint"),
    *("azure_storage_endpoint", "azure_endpoint"),
)

_first_user: Final[dict[str, int]] = {}
"""The id of the process that was the first to use obstore. In a child that was forked from it,
calls would never return, because obstore's threads do not exist there."""


def load_obstore() -> ModuleType:
    """Import and return obstore; raise UnsupportedEnvironment if it is not installed."""
    module: ModuleType = import_extra(
        "object stores need obstore", "remote", "obstore", "obstore.store"
    )
    return module


def open_store(url: str, options: Mapping[str, Any]) -> Any:
    """Return a store of obstore for the objects below a URL. The store does not repeat requests.

    Raises UnsupportedEnvironment if obstore is not installed, or if this process was forked from a
    process that had used obstore; InvalidArgument if an option is invalid.
    """
    if _first_user.setdefault("first", os.getpid()) != os.getpid():
        raise UnsupportedEnvironment(
            f"{url}: this process was forked from one that has used object stores, whose threads "
            "do not survive a fork: start it with spawn, forkserver or shardio's zygote"
        )
    endpoint = endpoint_of(options)
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise InvalidArgument(f"{url}: the endpoint must begin with http:// or https://")
    for name in filter(_CLIENT_OPTIONS.fullmatch, options):
        raise InvalidArgument(
            f"{url}: {name} is an option of the client: write "
            f"storage_options={{'client_options': {{{name!r}: …}}, …}}"
        )
    given, timeout = dict(options), timedelta(seconds=REQUEST_TIMEOUT_S)
    allows_http = url.startswith("http://") or endpoint.startswith("http://")
    client: dict[str, Any] = {"timeout": timeout, "allow_http": allows_http}
    client["connect_timeout"] = timedelta(seconds=CONNECT_TIMEOUT_S)
    client |= given.pop("client_options", {})
    # ObjectStore repeats requests, not obstore: Ctrl-C can interrupt the pauses of ObjectStore.
    retries = {"max_retries": 0, "retry_timeout": timeout}
    retries |= given.pop("retry_config", {})
    provider = given.pop("credential_provider", None) or _profile_credentials(url, given)
    if provider is not None:
        given["credential_provider"] = provider
    module = load_obstore()
    try:
        return module.store.from_url(url, client_options=client, retry_config=retries, **given)
    except (module.exceptions.BaseError, TypeError, ValueError) as error:
        names = ", ".join(options) or "none"
        raise InvalidArgument(
            f"{url}: cannot open the store: {short_message(error, options)} "
            f"(storage_options: {names})"
        ) from None  # the text of `error` may contain secrets


def endpoint_of(options: Mapping[str, Any]) -> str:
    """Return the server named by the options or the environment; "" for the scheme's default."""
    named = [str(value) for key, value in options.items() if key.lower() in _ENDPOINTS]
    named += [os.environ.get(name.upper(), "") for name in _ENDPOINTS if name.startswith("aws_")]
    return next(filter(None, named), "")


def _profile_credentials(url: str, options: Mapping[str, Any]) -> Any:
    """Return boto3's credentials for AWS_PROFILE; None if AWS_PROFILE is unset or overridden."""
    is_aws = url.partition("://")[0].lower() in ("s3", "s3a")
    names = {name.lower().removeprefix("aws_") for name in options}
    if not is_aws or names & {"access_key_id", "secret_access_key", "skip_signature", "token"}:
        return None
    if "AWS_PROFILE" not in os.environ or "AWS_ACCESS_KEY_ID" in os.environ:
        return None  # obstore itself reads the environment, and container or instance metadata
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"AWS_PROFILE is set, and profiles need boto3 ({error}): pip install boto3, or "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    return Boto3CredentialProvider()
