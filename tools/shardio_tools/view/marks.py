"""Samples that the user has marked, with notes, until they are saved as a named subset."""

from __future__ import annotations

import os
import threading
from typing import Any, Final

import shardio
from shardio.maintenance import add_subset
from shardio_tools.view.source import Source

_MAX_MARKS: Final = 100_000
_MAX_NOTE: Final = 1000
"""The maximum length of a note, in characters."""
_MAX_NOTES: Final = 1 << 20
"""The maximum length of all notes together, in characters."""
_N_LISTED: Final = 10_000


class Marks:
    """The marked rows with their notes. They are kept in memory only. Thread-safe."""

    def __init__(self, source: Source, *, is_writable: bool) -> None:
        self._source, self._is_writable = source, is_writable
        self._notes: dict[int, str] = {}
        self._lock = threading.Lock()

    def check_writable(self) -> None:
        """Raise InvalidArgument if marks could not be saved in the dataset's folder."""
        path = self._source.path
        if self._source.is_remote:
            reason = "it is in an object store: add the subset to a local copy, and upload that"
        elif os.statvfs(path).f_flag & os.ST_RDONLY:
            reason = "its file system is read-only"
        elif not all(os.access(each, os.W_OK | os.X_OK) for each in (path, f"{path}/generations")):
            reason = "this user has no permission to write to its folder"
        else:
            return
        raise shardio.InvalidArgument(f"--writable: cannot save subsets in {path}: {reason}")

    def note(self, row: int) -> str | None:
        """Return the note of a row, which may be empty; None if the row is not marked."""
        return self._notes.get(row)

    def set(self, content: Any) -> dict[str, Any]:
        """Mark a row or remove its mark, as a request says; return the number of marks.

        Raises:
            InvalidArgument: the request is invalid, or there are too many marks.
        """
        entry = content if isinstance(content, dict) else {}
        row, marked, note = entry.get("row"), entry.get("marked", True), entry.get("note", "")
        n = len(self._source.required())
        if type(row) is not int or not 0 <= row < n:
            raise shardio.InvalidArgument(f"row must be an integer from 0 to {n - 1}")
        if type(marked) is not bool:
            raise shardio.InvalidArgument("marked must be true or false")
        if note is None:
            note = ""
        if not isinstance(note, str) or len(note) > _MAX_NOTE:
            raise shardio.InvalidArgument(f"note must be a text of at most {_MAX_NOTE} characters")
        # A lone surrogate, half of a character of two, cannot be saved as UTF-8.
        note = note.encode(errors="replace").decode()
        with self._lock:
            length = sum(map(len, self._notes.values())) - len(self._notes.get(row, ""))
            if marked and length + len(note) > _MAX_NOTES:
                raise shardio.InvalidArgument(
                    f"all notes together have at most {_MAX_NOTES:,} characters: shorten or remove "
                    "some"
                )
            if not marked:
                self._notes.pop(row, None)
            elif row not in self._notes and len(self._notes) >= _MAX_MARKS:
                raise shardio.InvalidArgument(
                    f"at most {_MAX_MARKS:,} samples can be marked: remove some marks"
                )
            else:
                self._notes[row] = note
            return {"n": len(self._notes)}

    def clear(self) -> None:
        """Remove all marks."""
        with self._lock:
            self._notes.clear()

    def as_json(self) -> dict[str, Any]:
        """Return the marks in ascending order, at most 10,000, and their number."""
        with self._lock:
            rows = sorted(self._notes)
            listed = [{"row": row, "note": self._notes[row]} for row in rows[:_N_LISTED]]
        return {"marks": listed, "n": len(rows)}

    def _generation(self) -> int:
        """Return the published generation if its rows are those that are shown; else the shown one.

        Another viewer may have saved its marks.
        """
        shown = self._source.required()
        with shardio.open(self._source.path) as published:
            is_same = _rows_of(published) == _rows_of(shown)
            return published.generation if is_same else shown.generation

    def save(self, content: Any) -> dict[str, Any]:
        """Publish the marked rows as a named subset, and show the new generation.

        Raises:
            PermissionError: the viewer was started without --writable.
            InvalidArgument: the name is invalid, or taken, or no row is marked.
            DatasetConflict: other rows were published since the viewer opened the dataset.
        """
        if not self._is_writable:
            raise PermissionError("this viewer does not write: start it with --writable")
        entry = content if isinstance(content, dict) else {}
        name, overwrite = entry.get("name"), entry.get("overwrite", False)
        if not isinstance(name, str):
            raise shardio.InvalidArgument(f"name must be the subset's name; found {name!r:.80}")
        if type(overwrite) is not bool:
            raise shardio.InvalidArgument(
                f"overwrite must be true or false; found {overwrite!r:.80}"
            )
        with self._lock:
            rows = sorted(self._notes)
            if not rows:
                raise shardio.InvalidArgument("no sample is marked")
            notes = {row: note for row, note in self._notes.items() if note}
            dataset = self._source.required()
            if name in dataset.subsets and not overwrite:
                raise shardio.InvalidArgument(
                    f"there is a subset {name!r}: choose another name, or tick “replace”"
                )
            report = add_subset(
                self._source.path,
                name,
                rows,
                overwrite=overwrite,
                notes=notes,
                generation=self._generation(),
            )
            self._source.reload()
        return {"name": name, "n": len(rows), "generation": report.generation}


def _rows_of(dataset: shardio.ShardDataset) -> tuple[Any, ...]:
    """Return what two generations with the same rows, and only subsets of their own, share."""
    names = [*dataset.shards.names()]
    return dataset.lineage, names, dataset.shard_starts.tolist(), dataset.schema, dataset.classes
