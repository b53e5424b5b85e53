"""Whether a source holds anything of the kind that it was read as; what to do where it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from shardio.conversion.guessing import PROMISES, told_kind
from shardio.conversion.registry import known_kinds
from shardio.conversion.report import InputReport
from shardio.errors import InvalidArgument

_NOTHING: Final = ("unsupported", "part")
_MAX_SUFFIXES: Final = 4
_MAX_NAMES: Final = 3


class NothingFound(InvalidArgument):
    """No file of a source is of the kind."""


def refuse_nothing(
    source: str, kind: str, reports: Sequence[InputReport], *, is_told: bool, appends: bool
) -> None:
    """Make sure that a file is of the kind, be it broken, too short or there already.

    Args:
        source: what was read, as the user calls it.
        kind: what it was read as.
        reports: of all its files.
        is_told: whether the user said so.
        appends: to a dataset of that kind.

    Raises:
        NothingFound: there is none. It says what is there, and which kinds there are.
    """
    if not reports or any(report.outcome not in _NOTHING for report in reports):
        return
    promised = told_kind(report.name for report in reports)
    if is_told or promised:
        what = f"nothing of the kind {kind!r}"
    else:
        what = "no file whose name says of which kind it is, and no video"
    hint = "give its kind (--kind KIND, or kind=)"
    if appends:
        hint = "an append takes files of the kind that the dataset has"
    elif promised and promised != kind:
        hint = f"the names promise {promised!r} (--kind {promised}, or kind={promised!r})"
    error = NothingFound(f"{source}: holds {what}: {_described(reports)}; {hint}")
    error.add_note(_known())
    raise error


def _described(reports: Sequence[InputReport]) -> str:
    """Say which files there are, by their suffixes, and why the first one is none of the kind."""
    suffixes = Counter(PurePath(report.name).suffix.lower() or "no suffix" for report in reports)
    most = sorted(suffixes.items(), key=lambda each: (-each[1], each[0]))[:_MAX_SUFFIXES]
    named = [f"{suffix} ({n:,})" for suffix, n in most]
    if n_others := len(reports) - sum(n for _, n in most):
        named.append(f"others ({n_others:,})")
    first = next((f"; {each.name}: {each.reason}" for each in reports if each.reason), "")
    n_files = f"{len(reports):,} file{'s' * (len(reports) > 1)}"
    return f"{n_files}, {', '.join(named)}{first}"


def _known() -> str:
    """Say which kinds there are, and which names promise them."""
    told = [f"{kind} ({_shortened(names)})" for kind, names in PROMISES.items()]
    others = [kind for kind in known_kinds() if kind not in PROMISES]
    return (
        f"kinds that names promise: {', '.join(told)}; kinds that only --kind says: "
        f"{', '.join(others)}"
    )


def _shortened(names: Sequence[str]) -> str:
    return ", ".join([*names[:_MAX_NAMES], *["…"] * (len(names) > _MAX_NAMES)])
