"""What errors of obstore are to us: which may pass, in few words and without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from shardio.errors import InvalidArgument, ShardChanged, ShardNotFound, StoreAccessDenied

_MOST_CHARACTERS: Final = 300
_SECRETS: Final = ("key", "token", "secret", "password", "credential", "authorization", "sas")
_DENIED: Final = re.compile(
    r"ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthorizationHeader"
    r"|AccessDenied|AuthenticationFailed|RequestTimeTooSkewed|InvalidClientTokenId|\b40[13]\b"
)

_BEYOND: Final = re.compile(r"^InvalidRange\b|status code: 416\b")


class Passing(Exception):
    """Something that the next try need not meet."""


class sorted_out:
    """Errors of obstore over an object leave it as ours.

    Args:
        url, name: of the object.
        options: of the store, whose secrets no error shows.

    Raises:
        Passing: another try may succeed.
        ShardNotFound, ShardChanged, StoreAccessDenied, InvalidArgument, FileExistsError: none will.
    """

    def __init__(self, url: str, name: str, options: Mapping[str, Any]) -> None:
        self._url, self._name, self._options = url, name, options

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        home = type(error).__module__
        if home.startswith("obstore") or isinstance(error, FileNotFoundError):
            if not isinstance(error, ShardNotFound):
                raise _explained(self._url, self._name, error, self._options) from None


def replaced(url: str, name: str) -> ShardChanged:
    """The error of an object that is another one than was begun."""
    return ShardChanged(
        "another object has taken the place of the one that was being read",
        code="replaced",
        path=f"{url}/{name}",
    )


def _explained(url: str, name: str, error: Exception, options: Mapping[str, Any]) -> Exception:
    place, kind = f"{url}/{name}", type(error).__name__
    if isinstance(error, FileNotFoundError):
        return ShardNotFound(f"{place}: there is no such object in the store")
    if kind in ("AlreadyExistsError",):
        return FileExistsError(place)
    if kind in ("PreconditionError", "NotModifiedError"):
        return replaced(url, name)
    words = brief(error, options)
    if _is_denied(error):
        return StoreAccessDenied(
            f"{place}: the store refuses: {words}; renew or correct the credentials "
            "(environment, storage_options), or ask for permission to read there"
        )
    if re.search("NoSuchBucket|ContainerNotFound", words):
        return InvalidArgument(f"{place}: there is no such bucket: {words}; make it first")
    if _BEYOND.search(words):
        return ShardChanged(
            "the object in the store ends before what was asked for: it is empty, or a shorter one "
            "has taken its place; publish it anew, or open the dataset anew",
            code="file_size",
            path=place,
        )
    if "Header missing" in words:  # what answers does so every time
        return InvalidArgument(
            f"{place}: {words}: the server does not say what it must of objects, as one that sends "
            "them in chunks; copy the dataset to a folder"
        )
    kinds = ("NotSupportedError", "InvalidPathError", "UnknownConfigurationKeyError")
    if kind in kinds or "builder error" in words:  # no request came to be
        hint = "; copy the dataset to a folder" if kind == kinds[0] else ""
        return InvalidArgument(f"{place}: {words}{hint}")
    return Passing(words)


def brief(error: BaseException, options: Mapping[str, Any]) -> str:
    """What an error of obstore says, in one line, without anything that may be secret."""
    text = str(error)
    code, message = (re.search(f"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code is not None:
        text = f"{code[1]}: {message[1]}" if message is not None else code[1]
    text = text.partition("\n\nDebug source")[0]
    text = re.sub(r"://[^/\s]*@", "://…@", text)
    text = " ".join(re.sub(r"\?[^\s\"'>)]*", "", text).split())
    for secret in _secrets_of(options):
        text = text.replace(secret, "…")
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def _is_denied(error: BaseException) -> bool:
    """Whether a store has refused what it was shown, or was not shown: trying again is no use."""
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return True
    text = str(error)
    found = re.search("<Code>([^<]*)</Code>", text)
    status = re.search(r"status(?: code)?:? *(\d\d\d)[^\n]*", text, re.IGNORECASE)
    shown = found[1] if found is not None else status[0] if status is not None else ""
    return _DENIED.search(shown) is not None


def _secrets_of(options: Mapping[str, Any]) -> list[str]:
    """The values of options that may be secret, also of options within options."""
    found = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += _secrets_of(value)
        elif isinstance(value, str) and any(part in name.lower() for part in _SECRETS):
            found.append(value)
    return [each for each in found if len(each) > 3]
