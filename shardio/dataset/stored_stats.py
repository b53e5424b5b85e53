"""The statistics stored with a dataset, as a dict that shows itself in one line or in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from shardio._base.classes import listed
from shardio._base.html import format_number, fragment, listing, note, table
from shardio._base.progress import counted

_FIGURES: Final = ("count", "mean", "std", "min", "max", "missing")
_NONE: Final = "no statistics: shardio.maintenance.compute_stats(path) computes and stores them"


class DatasetStats(dict[str, Any]):
    """A dict of stored statistics: "whole" for all samples, "subsets" for each subset.

    `shardio.maintenance.StatsReport` describes the statistics of each. They are read from a file
    and not checked, so a part of another form is left out.
    """

    def __repr__(self) -> str:
        facts = [
            f"{f'subset {name!r} ' if name else ''}{counted(part['samples'], 'samples')}"
            for name, part in self._parts()
            if isinstance(part.get("samples"), int)
        ]
        fields = {field: None for _, part in self._parts() for field in _dict(part, "fields")}
        facts += [f"fields {listed(fields, 80)}"] if fields else []
        return f"DatasetStats({listed(facts or [_NONE], 180)})"

    def _repr_html_(self) -> str:
        whole = self.get("whole")
        n = whole.get("samples") if isinstance(whole, Mapping) else None
        facts = [counted(n, "samples") if isinstance(n, int) else "", "" if self else _NONE]
        return fragment("DatasetStats", "", facts, *self.html_parts())

    def html_parts(self) -> Iterator[str]:
        """Yield the parts of a fragment: classes, a table of the fields, notes on their pixels."""
        classes = _dict(_dict(self, "whole"), "classes")
        yield listing(
            "classes", (f"{name} {format_number(n)}" for name, n in classes.items()), len(classes)
        )
        found = [
            (name, field, figures)
            for name, part in self._parts()
            for field, figures in _dict(part, "fields").items()
            if isinstance(figures, Mapping)
        ]
        rows = ((name, field, *map(figures.get, _FIGURES)) for name, field, figures in found)
        yield table(("subset", "field", *_FIGURES), rows, len(found))
        yield from (
            note(_pixels_text(f"{n} {field}".strip(), figures)) for n, field, figures in found
        )

    def _parts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the statistics of all samples with "", then those of each subset with its name."""
        if whole := _dict(self, "whole"):
            yield "", whole
        subsets = _dict(self, "subsets")
        yield from ((name, part) for name in subsets if (part := _dict(subsets, name)))


def _dict(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name)
    return value if isinstance(value, Mapping) else {}


def _pixels_text(name: str, found: Mapping[str, Any]) -> str:
    """Return a call of Normalize with the statistics of a field's pictures, and the frame count."""
    if not (found.get("pictures") and found.get("count") and "channels" in found):
        return ""
    mean, std = (
        ", ".join(f"{level / 255:.4f}" for level in found["channels"][key])
        for key in ("mean", "std")
    )
    n = found.get("frames_per_video", 0)
    frames = "" if n == 0 else f" (of {'all' if n is None else n} frames of each video)"
    return f"{name}: Normalize(mean=({mean}), std=({std})){frames}"
