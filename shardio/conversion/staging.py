"""The work folder `out/.conversion`, which holds the shards of a conversion until it is published.

When all units are finished, their shards are linked into `out`, and the dataset is published. An
interrupted conversion resumes from the finished units and the journal in the work folder.

If a dataset in `out` is to be replaced, the old dataset is moved into the work folder just before
the new one is published. If publishing fails, the old dataset is moved back.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from shardio._base.progress import format_size
from shardio.conversion.append import check_dataset_exists
from shardio.conversion.journal import (
    MIN_UNIT_BYTES,
    PLAN_FILE,
    PUBLISHED_FILE,
    JournaledPlan,
    check_same_settings,
    check_same_units,
    has_records,
    lacks_units,
    plan_path,
    read_plan,
    write_plan,
)
from shardio.dataset.manifest import (
    POINTER,
    WORK_FOLDER,
    holds_dataset,
    load_generation,
    recover,
    refuse_existing,
)
from shardio.dataset.transaction import (
    check_only_dataset,
    dataset_entries,
    explain_error,
    link_staged,
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
    lock_folder,
    lock_holder,
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
REPLACE_HINT: Final = (
    "overwrite=True (--overwrite) replaces it, append=True (--append) adds to it; or choose "
    "another folder"
)
LOCK_TIMEOUT_S: Final = 2.0
"""The time to wait for the lock of a running process, which may be about to exit."""
_WORKERS_TIMEOUT_S: Final = 30.0
"""The time to wait for the workers of a process that has exited; they hold its lock until they have
exited, too. This takes longer on a busy machine."""


class Staging:
    """The work folder `out/.conversion`. Within the `with` block, this object owns and locks it.

    In the local folder of an upload, `hint` says how to start the upload from the beginning;
    otherwise it is "".

    After `finish`, the end of the `with` block removes the work folder, except the plan of an
    upload. Without `finish`, the folder is kept if a unit is finished. Without finished units, it
    is removed, and so is `out` if this object has created it.
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
        self.given = Path(out)
        """The folder as the caller names it, for reports and messages; `out` is its full path."""
        self.out = Path(os.path.abspath(out))
        self.folder = self.out / WORK_FOLDER
        self.is_published, self.lock_fd = False, -1
        self._resume, self._overwrite, self.appends = resume, overwrite, appends
        restart_hint = self._abandon_hint if appends else "overwrite (--overwrite) starts again"
        self._store_hint, self._restart_hint = hint, hint or restart_hint
        self._replaced_folder = self.folder / "replaced"
        self._plan: JournaledPlan | None = None
        self._has_started = self._is_finished = self._created_out = False

    def check(self) -> None:
        """Raise DatasetExists if `out` cannot be written to, as far as is known without a lock."""
        self._check_work_folder()
        # If there is a work folder, `_inspect` checks `out`, after it has removed the files that an
        # earlier conversion has left.
        if not self.folder.exists():
            self._check_out()

    def __enter__(self) -> Self:
        self.check()
        self._created_out = not self.out.exists()
        try:
            self._lock()
            self._inspect()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _check_work_folder(self) -> None:
        """Raise DatasetExists if the work folder is not a folder, or contains unknown entries."""
        try:
            kind = os.lstat(self.folder).st_mode
        except (OSError, ValueError):
            # The folder does not exist, or its path is unusable: then creating it fails later.
            return
        if not stat.S_ISDIR(kind):
            raise DatasetExists(
                f"{self.folder}: expected a folder for the work of a conversion, found a link "
                "or file; remove it, or choose another folder"
            )
        # Another conversion may remove its work folder before it is listed here.
        with contextlib.suppress(FileNotFoundError):
            names = sorted(
                name for name in os.listdir(self.folder) if not _OWN_ENTRIES.fullmatch(name)
            )
            if names:
                raise DatasetExists(
                    f"{self.folder}: holds {names[0]} ({len(names)} such entries in all), not "
                    "created by a conversion; move it away, or choose another folder"
                )

    def _inspect(self) -> None:
        """Remove what an earlier conversion has left, or prepare to resume it, per the options."""
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
                # Check the options before the plan is removed: if this raises an error, the upload
                # can still be resumed.
                self._check_out()
            self._remove_work()
            self._check_out()
            return
        if not self._store_hint and lacks_units(self.folder):
            self._undo()
            self._remove_work()
            self._check_out()
            return
        if self.appends:
            self._inspect_append()
            return
        if not (self._resume or self._overwrite):
            raise DatasetExists(self._describe_interrupted())
        if self._resume:
            self._plan = self._read_plan(self._restart_hint)
            if self._plan and self._plan.appends:
                raise DatasetExists(self._describe_interrupted())
        if not self.is_published:
            self._undo()
            self._check_out()

    def _inspect_append(self) -> None:
        # Errors suggest deleting the work folder, which would leave the links in `out`. Remove the
        # links before any error is raised.
        self._undo()
        plan = self._read_plan(self._abandon_hint)
        if plan is not None and not (plan.appends and self._resume):
            raise DatasetExists(self._describe_interrupted())
        self._plan = plan

    def _read_plan(self, hint: str) -> JournaledPlan | None:
        """Read the plan. An error ends with `hint`, which says how to continue without the plan."""
        try:
            return read_plan(self.folder)
        except (DatasetCorrupt, InvalidArgument) as error:
            raise type(error)(f"{error}; {hint}") from error

    def _describe_interrupted(self) -> str:
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
        if self.appends:
            check_dataset_exists(self.out)
            return
        remove_leftovers(self.out)
        if self._overwrite or (self._plan is not None and self._plan.replaces):
            check_only_dataset(self.out, exclude=WORK_FOLDER)
        else:
            refuse_existing(self.given, exclude=WORK_FOLDER, hint=REPLACE_HINT)

    def begin(self, settings: dict[str, object], units: Sequence[str]) -> None:
        """Write a plan for units with the keys `units` to the journal; remove all other units.

        If an interrupted conversion is resumed, its settings must be the same.
        """
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
        """Map the names of an append's shards to names that no file in `out` has."""
        prefix = f"g{number:06d}-"
        while any((self.out / f"{prefix}{name}").exists() for name in names):
            prefix += "-"
        return {name: f"{prefix}{name}" for name in names}

    def link_shards(self, shards: Sequence[tuple[str, str]]) -> None:
        """Move away a dataset that is to be replaced, and link finished shards into `out`, durably.

        Each item of `shards` consists of two paths of one shard: the existing path relative to the
        work folder, and the new path relative to `out`.
        """
        if self._plan is not None and self._plan.replaces and holds_dataset(self.out):
            make_folder(self._replaced_folder)
            for name in dataset_entries(self.out):
                rename_exclusive(str(self.out / name), str(self._replaced_folder / name))
        for name, final in shards:
            link_staged(self.folder / name, self.out / final)
        sync_path(self.out)

    def _has_published(self) -> bool:
        """Return True if a generation of `out` lists a shard of this work folder.

        If a writer was killed while it published a generation, that generation is removed first. In
        an upload, shards are removed once they are in the store. The result is then True for any
        dataset in `out`, because no other conversion uses this folder.
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
        """Remove from `out` the links to shards in the work folder; restore a replaced dataset."""
        undo(self.out, self.folder, is_private=bool(self._store_hint))
        if self._replaced_folder.exists():
            # Move `dataset.json` last: the dataset exists for readers only when this file exists.
            for name in sorted(os.listdir(self._replaced_folder), key=lambda name: name == POINTER):
                if not (self.out / name).exists():  # Another writer may have created the file.
                    rename_exclusive(str(self._replaced_folder / name), str(self.out / name))
            sync_path(self.out)

    def discard_units(self) -> None:
        """Remove the shards and records of all units, because they will not be published."""
        self._clear(exclude={PLAN_FILE})

    def finish(self) -> None:
        """Record that the dataset is published: the `with` block then removes the work folder."""
        sync_path(self.out)
        self._is_finished = True

    def _remove_work(self) -> None:
        """Mark the plan as published, and remove all files; keep the plan of an upload."""
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

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            # If a file cannot be removed now, the next conversion removes it.
            with contextlib.suppress(OSError):
                self._clean_up(error)
        finally:
            if self.lock_fd >= 0:
                os.close(self.lock_fd)
                self.lock_fd = -1
            explain_error(error, self.folder, self.given)

    def _clean_up(self, error: BaseException | None) -> None:
        if not self._has_started:
            # `remove_folder` removes only empty folders: an interrupted conversion is kept.
            remove_folder(self.folder)
        elif self._is_finished:
            self._remove_work()
            remove_folder(self.folder)
        elif not self._keeps_work():
            # Remove the plan first: if this process is then killed, nothing is left to resume.
            unlink(self.folder / PLAN_FILE)
            remove_tree(self.folder)
            if isinstance(error, KeyboardInterrupt):
                error.add_note(
                    f"{self.out}: nothing is kept, because no unit was finished; a unit has "
                    f"consecutive files of {format_size(MIN_UNIT_BYTES)} or more in all"
                )
        elif error is not None:
            option = (
                "append and resume (--append --resume)" if self.appends else "resume (--resume)"
            )
            kept = f"{self.out}: finished units are kept; {option} continues from them"
            error.add_note(f"{kept}; {self._restart_hint}")
        if self._created_out:
            remove_folder(self.out)  # The folder is kept if it is not empty.

    def _keeps_work(self) -> bool:
        """Restore `out` if the dataset is not published; return False if no unit can be resumed."""
        try:
            if not self._has_published():
                self._undo()
                return has_records(self.folder)
        except (OSError, DataError):
            pass  # The next conversion tries again, and raises the error if it fails too.
        return True

    def _lock(self) -> None:
        """Create the work folder and lock it; wait for some time if it is locked."""
        start_s = time.monotonic()
        while self.lock_fd < 0:
            try:
                make_folder(self.folder)
                self.lock_fd = lock_folder(self.folder)
            except FileNotFoundError:
                # Another conversion has removed the folder before it was locked: try again. If
                # `out` cannot be created, all attempts fail.
                if time.monotonic() > start_s + LOCK_TIMEOUT_S:
                    raise
            except BlockingIOError as error:
                timeout_s, text = _wait_for(lock_holder(self.folder))
                if time.monotonic() > start_s + timeout_s:
                    raise DatasetConflict(
                        f"{self.out}: {text}, or choose another folder"
                    ) from error
                time.sleep(0.02)


def _wait_for(holder: int | None) -> tuple[float, str]:
    """Return the time to wait for a process that holds the lock, and the error at its end."""
    if holder is None:
        return LOCK_TIMEOUT_S, "another conversion is writing here: wait for it"
    command = _command_of(holder)
    if not command:
        return _WORKERS_TIMEOUT_S, (
            f"another conversion was writing here: its process {holder} has exited, but its "
            f"workers still run after {_WORKERS_TIMEOUT_S:.0f} s: end them"
        )
    return LOCK_TIMEOUT_S, (
        f"another conversion is writing here, in process {holder} ({command:.100}): wait for it"
    )


def _command_of(pid: int) -> str:
    """Return the command of a process; "" if the process has exited, also if it is a zombie."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return " ".join(file.read().decode("utf-8", "replace").split("\0")).strip()
    except OSError:
        return ""
