"""Loaders for tests: their classes are local, so that no worker imports a module of tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardio import Loader


def loader_of(
    load: Callable[[Any], Any],
    post_process: Callable[[Any], Any] = lambda response: response,
    make_request: Callable[[Any], Any] = lambda item: item,
    shutdown: Callable[[], None] = lambda: None,
) -> Loader:
    """Make a loader of these functions; only `load` travels."""

    class Made(Loader):
        def make_request(self, item: Any) -> Any:
            return make_request(item)

        def load(self, request: Any) -> Any:
            return load(request)

        def post_process(self, response: Any) -> Any:
            return post_process(response)

        def shutdown(self) -> None:
            shutdown()

        def __reduce__(self) -> Any:
            return loader_of_load, (load,)

    def loader_of_load(load: Callable[[Any], Any]) -> Any:
        class Loads:
            def load(self, request: Any) -> Any:
                return load(request)

        return Loads()

    return Made()
