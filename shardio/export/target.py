"""The output folder of an export: built in a hidden folder, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import types
from pathlib import Path
from typing import Final, Self

from shardio.dataset.manifest import check_folder_name, holds_dataset
from shardio.errors import DatasetExists, InvalidArgument
from shardio.maintenance.rewriting import make_staging, sweep
from shardio.storage.fs import exchange, make_folder, remove_tree, rename, sync_folder

ABOUT_FILE: Final = "_export.json"
"""Metadata of an export; Parquet readers ignore names with this prefix."""
_NOT_EMPTY_ERRNOS: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class ExportTarget:
    """A hidden staging folder beside `out`, owned by the `with` block; `publish` renames it.

    Raises:
        DatasetExists: `out` is not empty, or with `overwrite`, is not an export.
        InvalidArgument: `out` lies in the folder of a dataset, or `source` lies in `out`.
    """

    def __init__(self, out: str | os.PathLike[str], source: str, *, overwrite: bool) -> None:
        check_folder_name(out)
        self.out = Path(os.path.abspath(out))
        self._overwrite = overwrite
        # The old export's name during the switch, on file systems that cannot exchange two folders.
        self._replaced = self.out.with_name(f".{self.out.name}.replaced")
        for folder in (self.out, *self.out.parents):
            if holds_dataset(folder):
                raise InvalidArgument(
                    f"{self.out}: {folder} holds a dataset; choose a folder outside of it"
                )
        if self.out in Path(os.path.realpath(source)).parents:
            raise InvalidArgument(f"{self.out}: contains the dataset; choose another folder")
        self._check_out()

    def _check_out(self) -> None:
        if not os.path.lexists(self.out):
            return
        if self.out.is_symlink() or not self.out.is_dir():
            raise DatasetExists(f"{self.out}: expected a folder, found a link or file")
        names = os.listdir(self.out)
        if names and not (self._overwrite and ABOUT_FILE in names):
            hint = (
                "which overwrite does not replace" if self._overwrite else "choose another folder"
            )
            if ABOUT_FILE in names:
                hint = "which overwrite (--overwrite) replaces"
            what = "an export" if ABOUT_FILE in names else f"{min(names)!r}, not an export"
            raise DatasetExists(f"{self.out}: holds {what}, {hint}")

    def __enter__(self) -> Self:
        make_folder(self.out.parent)
        sweep(self.out.parent)
        if (self._replaced / ABOUT_FILE).exists() and not os.path.lexists(self.out):
            rename(self._replaced, self.out)  # an export was killed in the middle of `_rename`
            self._check_out()
        self._staging, self._fd = make_staging(self.out.parent)
        self.folder = self._staging / "new"
        try:
            if (self._replaced / ABOUT_FILE).exists():  # one was killed at the end of `_rename`
                rename(self._replaced, self._staging / "older")
            make_folder(self.folder)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def publish(self) -> None:
        """Rename the staging folder to `out`.

        Raises:
            DatasetExists: another process has created something at `out` meanwhile.
        """
        sync_folder(str(self.folder))
        is_replaced = self._overwrite and self.out.is_dir() and bool(os.listdir(self.out))
        if is_replaced:
            self._check_out()
        if not (is_replaced and exchange(str(self.folder), str(self.out))):
            self._rename(is_replaced=is_replaced)
        sync_folder(str(self.out.parent))

    def _rename(self, *, is_replaced: bool) -> None:
        """Rename the folder to `out`; with `is_replaced`, rename the old export away first."""
        if is_replaced:
            rename(self.out, self._replaced)
        try:
            rename(self.folder, self.out)
        except BaseException as error:
            if is_replaced:
                with contextlib.suppress(OSError):  # raise the first error
                    rename(self._replaced, self.out)
            if not isinstance(error, OSError) or error.errno not in _NOT_EMPTY_ERRNOS:
                raise
            raise DatasetExists(
                f"{self.out}: another process has written there meanwhile"
            ) from error
        if (self._replaced / ABOUT_FILE).exists():
            rename(self._replaced, self._staging / "old")

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
                with contextlib.suppress(OSError):  # raise the first error
                    remove_tree(self._staging)
        finally:
            os.close(self._fd)
