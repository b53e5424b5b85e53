"""Where an export goes: a folder that appears under its name when all of it is on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import types
from pathlib import Path
from typing import Final, Self

from shardio.errors import DatasetExists, InvalidArgument
from shardio.maintenance.staging import make_staging, sweep
from shardio.manifest import check_folder_name, holds_dataset
from shardio.storage.fs import exchange, make_folder, remove_tree, rename, sync_folder

ABOUT_FILE: Final = "_export.json"
"""What an export says of itself; readers of Parquet pass over names that begin so."""
_NOT_EMPTY_ERRNOS: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class ExportTarget:
    """Owns a hidden folder beside `out`, from `with` to its end; `publish` gives it its name.

    Raises:
        DatasetExists: there is something at `out` already; with `overwrite`, something else than an
            export.
        InvalidArgument: `out` lies in the folder of a dataset, or `source` in it.
    """

    def __init__(self, out: str | os.PathLike[str], source: str, *, overwrite: bool) -> None:
        check_folder_name(out)
        self.out = Path(os.path.abspath(out))
        self._overwrite = overwrite
        # What gives way has this name for a moment, where a file system cannot swap two.
        self._aside = self.out.with_name(f".{self.out.name}.replaced")
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
        if names and not (self._overwrite and ABOUT_FILE in names):
            way = "which overwrite does not replace" if self._overwrite else "name another folder"
            if ABOUT_FILE in names:
                way = "which overwrite (--overwrite) replaces"
            what = "an export" if ABOUT_FILE in names else f"{min(names)!r}, which is no export's"
            raise DatasetExists(f"{self.out}: holds {what}, {way}")

    def __enter__(self) -> Self:
        make_folder(self.out.parent)
        sweep(self.out.parent)
        if (self._aside / ABOUT_FILE).exists() and not os.path.lexists(self.out):
            rename(self._aside, self.out)  # an export was killed before the new one had the name
            self._refuse_others()
        self._staging, self._fd = make_staging(self.out.parent)
        self.folder = self._staging / "new"
        try:
            if (self._aside / ABOUT_FILE).exists():  # it was killed when the new one had the name
                rename(self._aside, self._staging / "older")
            make_folder(self.folder)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def publish(self) -> None:
        """Let the folder appear as `out`.

        Raises:
            DatasetExists: somebody else has put something there meanwhile.
        """
        sync_folder(str(self.folder))
        is_replaced = self._overwrite and self.out.is_dir() and bool(os.listdir(self.out))
        if is_replaced:
            self._refuse_others()
        if not (is_replaced and exchange(str(self.folder), str(self.out))):
            self._rename(is_replaced=is_replaced)
        sync_folder(str(self.out.parent))

    def _rename(self, *, is_replaced: bool) -> None:
        """Give the folder its name; what `is_replaced` has another one until then."""
        if is_replaced:
            rename(self.out, self._aside)
        try:
            rename(self.folder, self.out)
        except BaseException as error:
            if is_replaced:
                with contextlib.suppress(OSError):  # what went wrong first is to be told
                    rename(self._aside, self.out)
            if not isinstance(error, OSError) or error.errno not in _NOT_EMPTY_ERRNOS:
                raise
            raise DatasetExists(f"{self.out}: somebody has written there meanwhile") from error
        if (self._aside / ABOUT_FILE).exists():
            rename(self._aside, self._staging / "old")

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
