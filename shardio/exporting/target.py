"""Where an export goes: a folder that appears under its name when all of it is on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import types
from pathlib import Path
from typing import Final, Self

from shardio.disk import make_folder, remove_tree, rename
from shardio.errors import DatasetExists, InvalidArgument
from shardio.manifest import holds_dataset
from shardio.storage import sync_folder
from shardio.surgery.staging import make_staging, sweep

ABOUT: Final = "_export.json"
"""What an export says of itself; readers of Parquet pass over names that begin so."""


class Target:
    """Owns a hidden folder beside `out`, from `with` to its end; `publish` gives it its name.

    Raises:
        DatasetExists: there is something at `out` already; with `overwrite`, something else than an
            export.
        InvalidArgument: `out` lies in the folder of a dataset, or `source` in it.
    """

    def __init__(self, out: str | os.PathLike[str], source: str, *, overwrite: bool) -> None:
        self.out = Path(os.path.abspath(out))
        self._overwrite = overwrite
        for folder in (self.out, *self.out.parents):
            if holds_dataset(folder):
                raise InvalidArgument(
                    f"{self.out}: {folder} holds a dataset, where nothing else belongs: "
                    "name another folder"
                )
        if self.out in Path(os.path.realpath(source)).parents:
            raise InvalidArgument(f"{self.out}: the dataset lies in it: name another folder")
        self._refuse_others()

    def _refuse_others(self) -> None:
        if not os.path.lexists(self.out):
            return
        if self.out.is_symlink() or not self.out.is_dir():
            raise DatasetExists(f"{self.out}: expected a folder, found a link or file")
        names = os.listdir(self.out)
        if names and not (self._overwrite and ABOUT in names):
            way = "which overwrite does not replace" if self._overwrite else "name another folder"
            if ABOUT in names:
                way = "which overwrite (--overwrite) replaces"
            what = "an export" if ABOUT in names else f"{min(names)!r}, which is no export's"
            raise DatasetExists(f"{self.out}: holds {what}, {way}")

    def __enter__(self) -> Self:
        make_folder(self.out.parent)
        sweep(self.out.parent)
        self._staging, self._fd = make_staging(self.out.parent)
        self.folder = self._staging / "new"
        make_folder(self.folder)
        return self

    def publish(self) -> None:
        """Let the folder appear as `out`.

        Raises:
            DatasetExists: somebody else has put something there meanwhile.
        """
        sync_folder(str(self.folder))
        if self._overwrite and self.out.is_dir() and os.listdir(self.out):
            self._refuse_others()
            rename(self.out, self._staging / "old")
        try:
            rename(self.folder, self.out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise DatasetExists(f"{self.out}: somebody has written there meanwhile") from error
        sync_folder(str(self.out.parent))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            if error is None:
                remove_tree(self._staging)
            else:
                with contextlib.suppress(OSError):  # what went wrong first is to be told
                    remove_tree(self._staging)
        finally:
            os.close(self._fd)
