"""obstore, which is loaded late: stores made of a URL and options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.storage.remote.failures import brief

REQUEST_S: Final = 30
"""A request, of at most a piece, that takes longer is made again: 280 kB/s of a piece of 8 MiB."""
_ENDPOINTS: Final = (
    *("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint"),
    *("azure_storage_endpoint", "azure_endpoint"),
)

_users: Final[dict[str, int]] = {}
"""The first process that used obstore: its runtime does not survive a fork, which then hangs."""


def load_obstore() -> ModuleType:
    """Load obstore.

    Raises:
        UnsupportedEnvironment: it is not installed.
    """
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"object stores need obstore ({error}): {install_hint('remote')}"
        ) from error
    module: ModuleType = obstore
    return module


def open_store(url: str, options: Mapping[str, Any]) -> Any:
    """A store of obstore for what lies below a URL; every request is tried once.

    Raises:
        UnsupportedEnvironment: obstore is not installed, or a parent of this process has used it.
        InvalidArgument: it takes no such option; the message has names of options alone.
    """
    if _users.setdefault("first", os.getpid()) != os.getpid():
        raise UnsupportedEnvironment(
            f"{url}: this process is a fork of one that has used object stores, whose threads did "
            "not come with it: start it by spawn, forkserver or shardio's zygote"
        )
    endpoint = endpoint_of(options)
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise InvalidArgument(f"{url}: its endpoint must begin with http:// or https://")
    given = dict(options)
    client = {"timeout": timedelta(seconds=REQUEST_S), "allow_http": _is_plain(url, options)}
    client |= given.pop("client_options", {})
    # Once: who calls decides how long it goes on, and sees Ctrl-C in between.
    retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=REQUEST_S)}
    retries |= given.pop("retry_config", {})
    provider = given.pop("credential_provider", None) or _profile_of(url, given)
    if provider is not None:
        given["credential_provider"] = provider
    module = load_obstore()
    try:
        return module.store.from_url(url, client_options=client, retry_config=retries, **given)
    except (module.exceptions.BaseError, TypeError, ValueError) as error:
        names = ", ".join(options) or "none"
        raise InvalidArgument(
            f"{url}: no store can be made of it: {brief(error, options)} (storage_options: {names})"
        ) from None  # its text may have what is secret


def endpoint_of(options: Mapping[str, Any]) -> str:
    """Which server is asked, where that is not the one of the URL's scheme."""
    named = [str(value) for key, value in options.items() if key.lower() in _ENDPOINTS]
    named += [os.environ.get(name.upper(), "") for name in _ENDPOINTS if name.startswith("aws_")]
    return next(filter(None, named), "")


def _is_plain(url: str, options: Mapping[str, Any]) -> bool:
    """Whether the user has named a server by http://, where nothing is encrypted."""
    return url.startswith("http://") or endpoint_of(options).startswith("http://")


def _profile_of(url: str, options: Mapping[str, Any]) -> Any:
    """What gives credentials of a profile of AWS, by boto3, where nothing else says any."""
    is_aws = url.partition("://")[0].lower() in ("s3", "s3a")
    names = {name.lower().removeprefix("aws_") for name in options}
    if not is_aws or names & {"access_key_id", "secret_access_key", "skip_signature", "token"}:
        return None
    is_named = "AWS_PROFILE" in os.environ
    if not is_named or "AWS_ACCESS_KEY_ID" in os.environ:
        return None  # obstore asks the environment, the container or the machine
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"AWS_PROFILE is set, and profiles are read by boto3 ({error}): pip install boto3, or "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    return Boto3CredentialProvider()
