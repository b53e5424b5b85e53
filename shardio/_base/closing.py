"""What the end of a `with` does to things that hold files, maps or processes."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closes itself at the end of its `with`, however that is left."""

    @abstractmethod
    def close(self) -> object:
        """Finish, and let go of what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()


class Publishing(Closing):
    """Publishes at the end of its `with` what was written; nothing, if an exception leaves that."""

    @property
    @abstractmethod
    def _is_closed(self) -> bool:
        """Whether `close` or `abort` has been called."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written; nothing is published. Idempotent."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._is_closed:
            self.close()
