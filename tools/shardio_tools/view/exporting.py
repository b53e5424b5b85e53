"""A static site of some samples: the page of the viewer with files instead of a server.

The page asks for `api/….json` instead of `api/…`, and the addresses in these files name media below
`data/`, which are relative to the page. Names of files are numbers, never text of the dataset.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

import shardio
from shardio.media import probe
from shardio_tools.output import decode_names, escaped
from shardio_tools.view.jobs import Jobs
from shardio_tools.view.mp4 import IMAGE_TYPES, MediaBytes, open_media
from shardio_tools.view.originals import original
from shardio_tools.view.overview import Overview
from shardio_tools.view.queries import number_fields
from shardio_tools.view.responses import static_files, to_json
from shardio_tools.view.rows import class_field, describe_rows
from shardio_tools.view.samples import describe_sample
from shardio_tools.view.series import heatmap, series
from shardio_tools.view.source import Source
from shardio_tools.view.stored import READ_ERRORS, number, stored_value
from shardio_tools.view.thumbnails import Thumbnails

Json = dict[str, Any]

_MODE: Final = b'<meta name="shardio-mode" content="server">'
"""The line of index.html that says where the page gets its data from."""
_STATIC_MODE: Final = (
    b'<meta name="shardio-mode" content="static">\n'
    b'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    b"script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self' blob:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'\">"
)
_CHUNK_BYTES: Final = 1 << 20
_MAX_ORIGINAL: Final = 1 << 20
"""The maximum size of a value that is exported for download in addition to what is shown."""
_MAX_FRAMES: Final = 240
_FRAME_SIDE: Final = 640
_THUMBNAIL_SIDE: Final = 320
_POINTS: Final = 2_000
"""The maximum number of frames of a video that browsers do not play, their size and that of
thumbnails in pixels, and the maximum number of points of a curve."""
_WAIT_S: Final = 30.0
"""The maximum time to wait for statistics."""
_SUFFIXES: Final = {
    "audio/mp4": ".m4a",
    "audio/wav": ".wav",
    "image/avif": ".avif",
    "image/bmp": ".bmp",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
    "video/mp4": ".mp4",
}
_SITE_FILE: Final = re.compile(
    r"index\.html|static/[\w-]+\.(css|html|js|svg)|api/(dataset|rows|statistics|sample/\d+)\.json"
    r"|data/\d+/\d+(-\w+)?(\.[^/]*)?"
)
"""The paths of files in a site."""
_NOT_EVERYWHERE: Final = ("hvc1",)
"""Codecs that many browsers do not play: frames are exported, too."""


def export_site(
    path: str, out: str | os.PathLike[str], *, n_samples: int = 100, overwrite: bool = False
) -> int:
    """Write a site that shows some samples, spread over the dataset; return their number.

    The folder appears when it is complete. A file server is needed to look at it, such as
    `python -m http.server`, because browsers run no modules from files. The
    path of the dataset, the inputs of its conversion and the options of operations are left out.
    With `overwrite`, the folder may be an earlier site, which is replaced.

    Raises:
        InvalidArgument: the folder exists, and must not or cannot be replaced.
        DatasetNotFound, DatasetCorrupt, …: the dataset cannot be opened.
        OSError: a file cannot be written.
    """
    target = Path(os.path.realpath(out))  # "." and links have other names than their folders
    _check_target(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    source = Source(path)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with source.opened() as dataset:
            n = _Site(staging, source, dataset).write(n_samples)
        staging.chmod(0o777 & ~_umask())
        _check_target(target, overwrite=overwrite)  # its files may have changed meanwhile
        if target.exists():
            _replace(target, staging)
        else:
            staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        source.close()
    return n


def _check_target(target: Path, *, overwrite: bool) -> None:
    """Raise InvalidArgument if a folder is there, unless it is a site that may be replaced."""
    if not target.exists():
        return
    page, hint, other = target / "index.html", "or remove it", None
    if page.is_file() and _STATIC_MODE in page.read_bytes():
        other = _other_file(target)
        if overwrite and other is None:
            return
        hint = "or replace it (--overwrite)"
    if other is not None:
        hint = f"or move {escaped(other)} out of it, which is no file of the site"
    raise shardio.InvalidArgument(
        f"{escaped(str(target))}: already exists: choose another folder, {hint}"
    )


def _other_file(site: Path) -> str | None:
    """Return the path of a file or link in the folder of a site that is not part of the site."""
    for folder, folders, files in os.walk(site):
        for name in (*files, *folders):
            path = Path(folder, name)
            place = path.relative_to(site).as_posix()
            if path.is_symlink() or (name in files and not _SITE_FILE.fullmatch(place)):
                return place
    return None


def _replace(target: Path, staging: Path) -> None:
    """Put the site in `staging` in the place of the one in `target`, which is then removed."""
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    target.rename(aside)
    try:
        staging.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    shutil.rmtree(aside)


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


class _Site:
    def __init__(self, folder: Path, source: Source, dataset: Any) -> None:
        self._folder, self._source, self._dataset = folder, source, dataset
        self._thumbnails = Thumbnails()

    def write(self, n_samples: int) -> int:
        dataset = self._dataset
        n = min(len(dataset), n_samples)
        chosen = np.unique(np.linspace(0, len(dataset) - 1, n).round().astype(np.int64)).tolist()
        self._write_page()
        self._write_overview(len(chosen))
        rows = describe_rows(dataset, chosen, range(len(chosen)))
        for facts in rows:
            self._write_sample(facts, len(chosen))
        self._write_json("api/rows.json", {"rows": rows})
        return len(chosen)

    def _write_page(self) -> None:
        for name, file in static_files().items():
            data = file.data
            if name == "index.html":
                if data.count(_MODE) != 1:
                    raise AssertionError(f"{name} has no line {_MODE.decode()}")
                self._write("index.html", [data.replace(_MODE, _STATIC_MODE)])
            else:
                self._write(f"static/{name}", [data])

    def _write_overview(self, n: int) -> None:
        jobs = Jobs()
        try:
            overview = Overview(self._source, jobs, is_writable=False, loader=None)
            found = _settled(overview.describe, lambda each: not each.get("pending"))
            statistics = _settled(overview.statistics, lambda each: each["state"] != "running")
            found = overview.describe()  # with the counts of the statistics
        finally:
            jobs.close()
        if statistics["state"] not in ("kept", "done"):
            statistics |= {"state": "none", "progress": 0}
        self._write_json("api/dataset.json", _published(found, self._source.path) | {"exported": n})
        statistics["text"] = _without_path(statistics["text"], self._source.path)
        self._write_json("api/statistics.json", statistics)

    def _write_sample(self, facts: Json, n: int) -> None:
        dataset, row = self._dataset, int(facts["row"])
        made = describe_sample(dataset, row)
        for k, field in enumerate(made["fields"]):
            if not field.get("missing") and not field.get("damaged"):
                self._write_field(row, k, field)
        facts["thumb"] = self._thumbnail(row, facts["image"])
        facts |= self._values(row)
        made |= {"n": n, "title": facts["title"], "mark": None}
        made["damaged"] = facts["damaged"] or made["damaged"]
        for each in (facts, made, *made["fields"]):
            if each.get("damaged"):
                each["damaged"] = _without_path(each["damaged"], self._source.path)
        self._write_json(f"api/sample/{row}.json", made)

    def _values(self, row: int) -> Json:
        """Return the values by which rows are filtered and sorted."""
        dataset, values = self._dataset, {}
        texts = [name for name, field in dataset.schema.items() if field.is_utf8]
        for name in [*number_fields(dataset), *texts]:
            try:
                value = stored_value(dataset, row, name)
            except READ_ERRORS:
                continue
            if value is not None:
                values[name] = value[:2000] if isinstance(value, str) else number(value)
        label = values.get(class_field(dataset) or "")
        return {"values": values, "class": label if isinstance(label, int) else None}

    def _thumbnail(self, row: int, field: str | None) -> str | None:
        if field is None:
            return None
        k = list(self._dataset.schema).index(field)

        def make() -> tuple[str, bytes]:
            found = self._thumbnails.get(self._dataset, row, field, _THUMBNAIL_SIDE)
            return _SUFFIXES[found.media_type], found.data

        return self._try(f"data/{row}/{k}-small", make)

    def _write_field(self, row: int, k: int, field: Json) -> None:
        """Write the files that a field of a sample links to, and set the links."""
        stem, name, kind = f"data/{row}/{k}", field["name"], field["kind"]
        dataset, frames = self._dataset, field.pop("frames", None)
        for key in ("src", "image"):
            if field.get(key) and field[key].startswith("/frame/"):
                field[key] = self._frame(stem, row, name, 0)
            elif field.get(key):
                field[key] = self._media(stem, row, name)
        if kind == "video":
            is_played = field["src"] is not None
            is_everywhere = not any(each in (field["mime"] or "") for each in _NOT_EVERYWHERE)
            field["frames"] = None
            if frames is not None and not (is_played and is_everywhere):
                self._write_frames(stem, row, field)
        for key in ("series", "waveform"):
            if field.get(key):
                field[key] = self._try(
                    f"{stem}-series",
                    lambda: (".json", to_json(series(dataset, row, name, _POINTS))),
                )
        if field.get("heatmap"):
            field["heatmap"] = self._try(
                f"{stem}-map", lambda: (".png", heatmap(dataset, row, name).data)
            )
        is_image = kind == "image" and field["dtype"] is None
        if kind in ("video", "audio") or (is_image and self._is_shown_as_stored(row, name)):
            field["original"] = field["src"]
        elif field["n_bytes"] > _MAX_ORIGINAL:
            field["original"] = None
        else:
            field["original"] = self._try(f"{stem}-original", lambda: self._original(row, name))

    def _is_shown_as_stored(self, row: int, name: str) -> bool:
        """Return True for an image that `_media` does not convert."""
        try:
            return probe(stored_value(self._dataset, row, name)).format in IMAGE_TYPES
        except READ_ERRORS:
            return True

    def _original(self, row: int, name: str) -> tuple[str, bytes]:
        found = original(self._dataset, row, name)
        return Path(found.file_name).suffix, found.data

    def _media(self, stem: str, row: int, name: str) -> str | None:
        try:
            media = open_media(self._dataset, row, name)
            path = stem + _SUFFIXES[media.media_type.partition(";")[0]]
            self._write(path, _chunks(media))
        except READ_ERRORS:
            return None
        return path

    def _frame(self, stem: str, row: int, name: str, n: int) -> str | None:
        return self._try(
            f"{stem}-{n}",
            lambda: (".jpg", self._thumbnails.frame(self._dataset, row, name, n, _FRAME_SIDE).data),
        )

    def _write_frames(self, stem: str, row: int, field: Json) -> None:
        """Write the first frames of a video; the length becomes theirs if there are more."""
        n = min(field["n_frames"], _MAX_FRAMES)
        for i in range(n):
            if self._frame(stem, row, field["name"], i) is None:
                n = i
                break
        if not n:
            return
        field["frames"] = f"{stem}-{{n}}.jpg"
        if n < field["n_frames"] and field["src"] is None:
            field |= {"n_frames": n, "seconds": n / field["fps"], "times": None}
            field["keyframes"] = [each for each in field["keyframes"] if each < n]

    def _try(self, stem: str, make: Callable[[], tuple[str, bytes]]) -> str | None:
        """Write a file, and return its path; None if its value cannot be read."""
        try:
            suffix, data = make()
        except READ_ERRORS:
            return None
        self._write(stem + suffix, [data])
        return stem + suffix

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, [to_json(value)])

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for each in chunks:
                file.write(each)


def _published(facts: Json, path: str) -> Json:
    """Return facts about a dataset without the paths of the machine: its own, and of its inputs."""
    report = facts["conversion"]
    return facts | {
        "path": facts["name"],
        "problems": [_without_path(text, path) for text in facts["problems"]],
        "conversion": None if report is None else report | {"failed": []},
        "generations": [each | {"what": _operation(each)} for each in facts["generations"]],
    }


def _without_path(text: str, path: str) -> str:
    """Return a text about files of a dataset with their paths in it."""
    return decode_names(text).replace(f"{decode_names(path).rstrip('/')}/", "")


def _operation(generation: Json) -> str:
    """Return the name of the operation that wrote a generation, without its options."""
    if generation["n_samples"] is None:
        return "cannot be read"
    return " ".join(itertools.takewhile(lambda word: "=" not in word, generation["what"].split()))


def _chunks(media: MediaBytes) -> Iterable[bytes]:
    for start in range(0, media.size, _CHUNK_BYTES):
        yield media.read(start, min(start + _CHUNK_BYTES, media.size))


def _settled(ask: Callable[[], Json], is_done: Callable[[Json], bool]) -> Json:
    """Return what the background jobs have found, after at most _WAIT_S."""
    end = time.monotonic() + _WAIT_S
    while True:
        found = ask()
        if is_done(found) or time.monotonic() > end:
            return found
        time.sleep(0.02)
