"""The work folder `out/.conversion`, which holds the shards of a conversion until it is published.

While a conversion runs, `out` itself holds no unpublished shards. Finished units of an interrupted
conversion stay in the work folder with the journal, and the next conversion can resume from them. A
dataset to be replaced is moved into the work folder just before the new one is published, and moved
back if publishing fails.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from shardio.conversion.append import check_dataset_exists
from shardio.conversion.journal import (
    PLAN_FILE,
    PUBLISHED_FILE,
    WORK_FOLDER,
    JournaledPlan,
    check_same_settings,
    check_same_units,
    has_records,
    plan_path,
    read_plan,
    write_plan,
)
from shardio.dataset.manifest import (
    POINTER,
    holds_dataset,
    load_generation,
    recover,
    refuse_existing,
)
from shardio.dataset.transaction import (
    check_only_dataset,
    dataset_entries,
    link_staged,
    lock_folder,
    names_staged,
    remove_leftovers,
    undo,
)
from shardio.errors import (
    DataError,
    DatasetConflict,
    DatasetCorrupt,
    DatasetExists,
    DatasetNotFound,
    InvalidArgument,
)
from shardio.storage.fs import (
    make_folder,
    remove_folder,
    remove_tree,
    rename,
    rename_exclusive,
    sync_path,
    unlink,
)

_OWN_ENTRIES: Final = re.compile(
    r"(attempts-)?[0-9a-f]{16}|compacted|replaced|\d+-\d+\.unit|(plan|published)\.json"
    r"|\.plan\.json\.[0-9a-f]+\.tmp"
)
"""Matches the names of the entries that a conversion creates in the work folder."""
LOCK_PATIENCE_S: Final = 2.0
"""The time to wait for the lock, which workers of a killed conversion hold until they exit."""


class Staging:
    """The work folder `out/.conversion`; locked and owned within the `with` block.

    `resume` continues an interrupted conversion, if there is one. `overwrite` starts again, and
    replaces a dataset in `out` once the new one is complete. `appends` is True for an append to the
    dataset in `out`. `hint` is the way to restart an upload; "" for a dataset in a folder.

    After `finish` the folder is removed; for an upload, everything in it except the plan. After an
    error the folder is kept if any unit is complete. Otherwise the folder is removed, and `out` too
    if this object created `out`.

    Raises:
        DatasetExists: `out` is a file, or contains data or an interrupted conversion, and no option
            allows this.
        DatasetNotFound: there is no dataset in `out` to append to.
        DatasetConflict: another process is writing to `out`.
    """

    def __init__(
        self,
        out: str,
        *,
        resume: bool = False,
        overwrite: bool = False,
        appends: bool = False,
        hint: str = "",
    ) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = self.out / WORK_FOLDER
        self.is_published, self.lock_fd = False, -1
        self._resume, self._overwrite, self.appends = resume, overwrite, appends
        restart_hint = self._abandon_hint if appends else "overwrite (--overwrite) starts again"
        self._store_hint, self._restart_hint = hint, hint or restart_hint
        self._replaced = self.folder / "replaced"
        self._plan: JournaledPlan | None = None
        self._has_started = self._is_finished = self._created_out = False

    def __enter__(self) -> Self:
        self._check_work_folder()
        if not self.folder.exists():  # otherwise, leftovers in it may have to be removed first
            self._check_out()
        self._created_out = not self.out.exists()
        self._lock()
        try:
            self._inspect()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _check_work_folder(self) -> None:
        """Refuse a work folder that no conversion created, because its content would be deleted."""
        try:
            kind = os.lstat(self.folder).st_mode
        except (OSError, ValueError):  # the folder is missing, or creating it raises later
            return
        if not stat.S_ISDIR(kind):
            raise DatasetExists(
                f"{self.folder}: expected a folder for the work of a conversion, found a link "
                "or file; remove it, or choose another folder"
            )
        with contextlib.suppress(FileNotFoundError):  # removed by its owner in the meantime
            names = sorted(
                name for name in os.listdir(self.folder) if not _OWN_ENTRIES.fullmatch(name)
            )
            if names:
                raise DatasetExists(
                    f"{self.folder}: holds {names[0]} ({len(names)} such entries in all), not "
                    "created by a conversion; move it away, or choose another folder"
                )

    def _inspect(self) -> None:
        """Inspect the files of an earlier conversion; raise if the options do not permit them."""
        path = plan_path(self.folder)
        if path is None:
            self._clear()
            self._check_out()
            return
        is_over = path.name == PUBLISHED_FILE or self._has_published()
        resumes = self._resume and not self.appends and holds_dataset(self.out)
        self.is_published = is_over and resumes
        if is_over and not resumes:
            if self._store_hint:
                self._check_out()  # an upload that is refused can still be resumed
            self._remove_work()
            self._check_out()
            return
        if self.appends:
            self._inspect_append()
            return
        if not (self._resume or self._overwrite):
            raise DatasetExists(self._interrupted())
        if self._resume:
            self._plan = self._read_plan(self._restart_hint)
            if self._plan and self._plan.appends:
                raise DatasetExists(self._interrupted())
        if not self.is_published:
            self._undo()
            self._check_out()

    def _inspect_append(self) -> None:
        """Prepare to resume an interrupted append."""
        self._undo()  # so that the user may also delete the folder
        plan = self._read_plan(self._abandon_hint)
        if plan is not None and not (plan.appends and self._resume):
            raise DatasetExists(self._interrupted())
        self._plan = plan

    def _read_plan(self, hint: str) -> JournaledPlan | None:
        """Read the plan; error messages end with `hint`, a way to continue without the plan."""
        try:
            return read_plan(self.folder)
        except DatasetCorrupt as error:
            raise DatasetCorrupt(f"{error}; {hint}") from error
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}; {hint}") from error

    def _interrupted(self) -> str:
        """Return a message about the interrupted conversion and how to continue."""
        with contextlib.suppress(DataError, InvalidArgument):
            plan = read_plan(self.folder)
            if plan is not None and plan.appends:
                return (
                    f"{self.out}: holds an interrupted append; append and resume (--append "
                    f"--resume) keeps its finished units; {self._abandon_hint}"
                )
        if self.appends:
            return (
                f"{self.out}: holds an interrupted conversion; resume it (--resume) before "
                "appending"
            )
        return (
            f"{self.out}: holds an interrupted conversion; resume (--resume) keeps its finished "
            f"units; {self._restart_hint}"
        )

    @property
    def _abandon_hint(self) -> str:
        return f"to abandon it, delete {self.folder}: the dataset is complete without it"

    def _check_out(self) -> None:
        """Check that the options permit the current content of `out`."""
        if self.appends:
            check_dataset_exists(self.out)
        elif self._overwrite or (self._plan is not None and self._plan.replaces):
            remove_leftovers(self.out)
            check_only_dataset(self.out, exclude=WORK_FOLDER)
        else:
            refuse_existing(self.out, exclude=WORK_FOLDER)

    def begin(self, settings: dict[str, object], units: Sequence[str]) -> None:
        """Write the plan to the journal; keep the units that an earlier plan shares."""
        if self._plan is not None:
            check_same_settings(self._plan, settings, self.out, self._restart_hint)
            if self.is_published:
                check_same_units(self._plan, units, self.out, self._store_hint)
        self._has_started = True
        if self.is_published:
            return
        replaces = holds_dataset(self.out) and not self.appends
        self._clear(exclude={PLAN_FILE, *units} if self._plan is not None else set())
        self._plan = JournaledPlan(settings, tuple(units), replaces, self.appends)
        write_plan(self.folder, self._plan)
        sync_path(self.out)

    def free_names(self, number: int, names: Sequence[str]) -> dict[str, str]:
        """Return names in `out` for the shards of an append that no file of a killed writer has."""
        prefixes = (f"g{number:06d}-{'-' * n}" for n in itertools.count())
        free = (
            prefix
            for prefix in prefixes
            if not any((self.out / f"{prefix}{name}").exists() for name in names)
        )
        prefix = next(free)
        return {name: f"{prefix}{name}" for name in names}

    def link_shards(self, shards: Sequence[tuple[str, str]]) -> None:
        """Link finished shards into `out`, durably; a dataset to be replaced is moved away first.

        `shards` has, for each shard, the name in the work folder and the name in `out`.
        """
        if self._plan is not None and self._plan.replaces and holds_dataset(self.out):
            make_folder(self._replaced)
            for name in dataset_entries(self.out):
                rename_exclusive(str(self.out / name), str(self._replaced / name))
        for name, final in shards:
            link_staged(self.folder / name, self.out / final)
        sync_path(self.out)

    def _has_published(self) -> bool:
        """Return True if the dataset in `out` names shards of this folder.

        A generation that `dataset.json` does not point to yet is removed first. In an upload, any
        dataset counts: `out` is private to the upload, and uploaded shards have left this folder.
        """
        if not holds_dataset(self.out):
            return False
        if self._store_hint:
            return True
        with contextlib.suppress(DataError, DatasetNotFound):
            return any(
                names_staged(self.out, self.folder, load_generation(self.out, number))
                for number in range(recover(self.out).number, 0, -1)
            )
        return False

    def _undo(self) -> None:
        """Remove the links to this folder's files from `out`, and move a replaced dataset back."""
        undo(self.out, self.folder, is_private=bool(self._store_hint))
        if self._replaced.exists():
            # The pointer comes last, as it completes the dataset.
            for name in sorted(os.listdir(self._replaced), key=lambda name: name == POINTER):
                if not (self.out / name).exists():  # otherwise another writer has created it
                    rename_exclusive(str(self._replaced / name), str(self.out / name))
            sync_path(self.out)

    def discard_units(self) -> None:
        """Remove all units, because they will not be used."""
        self._clear(exclude={PLAN_FILE})

    def finish(self) -> None:
        """Mark the dataset as published, so that the work folder is removed at the end."""
        sync_path(self.out)
        self._is_finished = True

    def _remove_work(self) -> None:
        """Remove everything that a published dataset does not need, the plan last.

        After a kill, the same conversion can be resumed and completes the removal.
        """
        if (self.folder / PLAN_FILE).exists():
            rename(self.folder / PLAN_FILE, self.folder / PUBLISHED_FILE)
            sync_path(self.folder)
        self._clear(exclude={PUBLISHED_FILE})
        if not self._store_hint:
            unlink(self.folder / PUBLISHED_FILE)

    def _clear(self, exclude: frozenset[str] | set[str] = frozenset()) -> None:
        for entry in list(os.scandir(self.folder)):
            if entry.name in exclude:
                continue
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                unlink(entry.path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            with contextlib.suppress(OSError):  # the next conversion cleans up
                self._clean_up(error)
        finally:
            self._unlock()

    def _clean_up(self, error: BaseException | None) -> None:
        if not self._has_started:
            remove_folder(self.folder)  # kept if it contains an interrupted conversion
        elif self._is_finished:
            self._remove_work()
            remove_folder(self.folder)
        elif not self._keeps_work():
            unlink(self.folder / PLAN_FILE)  # first: without a plan, nothing can be resumed
            remove_tree(self.folder)
        elif error is not None:
            option = (
                "append and resume (--append --resume)" if self.appends else "resume (--resume)"
            )
            kept = f"{self.out}: finished units are kept; {option} continues from them"
            error.add_note(f"{kept}; {self._restart_hint}")
        if self._created_out:
            remove_folder(self.out)  # kept if it contains the dataset

    def _keeps_work(self) -> bool:
        """Undo the renames of an unpublished dataset; return True if a unit can be resumed."""
        try:
            if not self._has_published():
                self._undo()
                return has_records(self.folder)
        except (OSError, DataError):  # the next conversion may succeed, or reports the error
            pass
        return True

    def _lock(self) -> None:
        """Create and lock the folder; wait for workers of a killed conversion to exit."""
        end_s = time.monotonic() + LOCK_PATIENCE_S
        while self.lock_fd < 0:
            try:
                make_folder(self.folder)
                self.lock_fd = lock_folder(self.folder)
            except FileNotFoundError:  # removed in between, or `out` cannot be created
                if time.monotonic() > end_s:
                    raise
            except BlockingIOError as error:
                if time.monotonic() > end_s:
                    raise DatasetConflict(
                        f"{self.out}: another conversion is writing here; wait for it, or choose "
                        "another folder"
                    ) from error
                time.sleep(0.02)

    def _unlock(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1
