"""Arguments that several commands share: output, execution backend, URLs of object stores."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import shardio
from shardio.errors import DatasetNotFound, ShardNotFound
from shardio_tools.output import shown_path, utf8_name


def add_output_arguments(
    add: Callable[..., Any],
    quiet: str = "print errors only",
    json: str = "print the report as JSON",
) -> None:
    """Add --quiet and --json with these help texts; `add` is a parser's `add_argument`."""
    add("--quiet", action="store_true", help=quiet)
    add("--json", action="store_true", help=json)


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?b)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: 4096, 64M and 64MiB with binary units, 100MB with decimal units."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 100MB or 64MiB; found {text!r}")
    number, unit, end = found[1], found[2].lower(), (found[3] or "").lower()
    factor = 1000 ** "kmgt".index(unit) * 1000 if unit and end == "b" else _UNITS[unit]
    return int(Fraction(number) * factor)


def add_shard_bytes_argument(add: Callable[..., Any], what: str = "new shard") -> None:
    """Add --shard-bytes, the target size of a `what`; `add` is a parser's `add_argument`."""
    add(
        "--shard-bytes",
        type=parse_bytes,
        metavar="N",
        default=256 << 20,
        help=f"target size of a {what} in bytes, or as in 100MB (default: 268435456, 256 MiB)",
    )


def add_rewrite_arguments(add: Callable[..., Any]) -> None:
    """Add the options of commands that rewrite datasets; `add` is a parser's `add_argument`."""
    add_shard_bytes_argument(add)
    add(
        "--workers",
        type=int,
        metavar="N",
        help="processes that verify the shards (default: as for shardio verify)",
    )
    add_output_arguments(add)


def add_engine_arguments(add: Callable[..., Any], workers: str) -> None:
    """Add --workers with its help, and the options of the execution backend."""
    add("--workers", type=int, metavar="N", help=workers)
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="where to run: this machine, or a Ray cluster (default: local)",
    )
    add(
        "--address",
        metavar="ADDRESS",
        help="address of the Ray cluster (default: $RAY_ADDRESS, or a local Ray)",
    )


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of the execution backend; silence the log lines of Ray."""
    if options.engine == "ray":
        # Ray does not print lines that match: without this, it prints the logs of lost machines.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    return {"engine": options.engine, "address": options.address}


_TAKES_URLS = {("inspect", "path"), ("serve", "path"), ("view", "path"), ("convert", "out")}
"""Pairs of a command and its argument that may be the URL of a dataset."""
_ADDRESS_OPTIONS = ("address", "bind")
"""Options whose values are network addresses, which look like URLs."""


def named_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object as a dict; raise ValueError for a repeated key."""
    for key, n in Counter(key for key, _ in pairs).items():
        if n > 1:
            raise ValueError(f"duplicate key {key!r:.60}")
    return dict(pairs)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about a mistyped word: the known word that is similar, if any."""
    close = difflib.get_close_matches(word, known, 1, 0.75)
    return f"; did you mean {close[0]}?" if close else ""


_OTHER_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("--force", "-f", "--replace"), "--overwrite"),
    **dict.fromkeys(("-j", "-w", "--jobs", "--num-workers", "--threads"), "--workers"),
    **dict.fromkeys(("-q", "--silent"), "--quiet"),
    "-v": "--verbose",
    "-V": "--version",
    **dict.fromkeys(("--converter", "--type"), "--kind"),
    "--format": "--store",
    **dict.fromkeys(("--shard-size", "--max-shard-size"), "--shard-bytes"),
}
"""Options of other programs, and the options of shardio that do the same."""


def habit_hint(flag: str, known: Iterable[str], command: str) -> str:
    """Return the end of a message about an option that other programs have; "" if none is known."""
    if (other := _OTHER_FLAGS.get(flag, "")) in known:
        return f"; write {other}"
    if flag in ("-o", "--out", "--output") and command not in ("bench", "inspect"):
        return "; OUT is an argument without an option, after the others"
    if flag == "--subset" and command == "view":
        return "; open the subset in the page: its filters have the subsets"
    if flag in ("-n", "-i", "--head", "--index", "--row") and command == "inspect":
        return "; write --sample N for one sample, or --sheet FILE for a picture of many"
    if flag in ("--val", "--test") and command == "convert":
        return "; write --split train=0.9,val=0.1"
    if flag in ("--classes", "--class-names") and command == "convert":
        return "; classes are the names of folders, or those of --labels FILE"
    if flag == "--seed" and command == "convert":
        return "; write --split-seed for --split; a ShardLoader shuffles: shuffle=True, seed=…"
    if flag == "--shuffle" and command == "convert":
        return "; the order is that of the names; a ShardLoader shuffles: shuffle=True, seed=…"
    if flag in ("--dry-run", "--limit", "--max-samples", "--num-samples") and command == "convert":
        what = "dry run" if flag == "--dry-run" else "limit"
        return f"; there is no {what}: convert a few files first, chosen by a pattern in quotes"
    if flag == "--compression":
        return "; media are compressed already, and --store chooses how"
    return ""


def is_url(text: object) -> bool:
    """Return True if the text is a URL."""
    return isinstance(text, str) and "://" in text


_PATHS = (
    *("path", "src", "sources", "out", "other", "labels", "file", "trace", "image", "sheet"),
    *("export", "tokenizer"),
)


def expand_home(options: argparse.Namespace) -> None:
    """Expand a leading `~` of paths: a shell does not if they are quoted."""
    for name in _PATHS:
        if isinstance(value := getattr(options, name, None), str):
            setattr(options, name, os.path.expanduser(value))
        elif isinstance(value, list):
            setattr(options, name, [*map(os.path.expanduser, value)])


_COPYING = {
    **dict.fromkeys(("http", "https"), "`curl -O`, and tar if it is an archive"),
    "hf": "`hf download --repo-type dataset NAME --local-dir FOLDER`",
}
"""Commands that copy files from a URL, by its scheme."""


def refuse_urls(options: argparse.Namespace) -> None:
    """Raise InvalidArgument if a command that works on folders was given a URL."""
    for name, value in vars(options).items():
        if name in _ADDRESS_OPTIONS or (options.command, name) in _TAKES_URLS:
            continue
        for each in value if isinstance(value, list) else [value]:
            if is_url(each) and name == "export":
                raise shardio.InvalidArgument(
                    f"--export {each}: a site is written to a local folder: copy it afterwards"
                )
            if is_url(each):
                what = "files" if options.command == "convert" else "dataset"
                scheme = each.partition("://")[0].lower()
                how = _COPYING.get(scheme, "`aws s3 sync` or `gcloud storage rsync`")
                raise shardio.InvalidArgument(
                    f"{each}: shardio {options.command} needs a local folder: copy the {what} "
                    f"first, for example with {how}"
                )


def subset_advice(error: shardio.ShardioError, options: argparse.Namespace) -> str | None:
    """Return a message for an error about a path such as set/train, if `train` is a subset of set.

    Return None for every other error.
    """
    if not isinstance(error, DatasetNotFound | ShardNotFound):
        return None
    path = str(error).partition(": ")[0]
    parent, name = os.path.split(path.rstrip("/"))
    try:
        with shardio.open(parent or ".") as dataset:
            is_subset = name in dataset.subsets
    except (shardio.ShardioError, OSError):
        return None
    if not is_subset:
        return None
    whole = shown_path(parent or ".")
    takes_subset = hasattr(options, "subset")
    advice = f"write {whole}" + (f" --subset {shown_path(name)}" if takes_subset else "")
    scope = "" if takes_subset else f"; shardio {options.command} works on whole datasets"
    return f"{path}: {name!r} is a subset of a dataset{scope}: {advice}"


def parse_shares(text: str) -> dict[str, float]:
    """Parse subsets such as "train=0.9,val=0.1"."""
    parts: dict[str, float] = {}
    for entry in utf8_name(text).split(","):
        name, _, share = entry.partition("=")
        name = name.strip()
        if name in parts:
            raise argparse.ArgumentTypeError(f"{name!r} is given twice")
        try:
            parts[name] = float(share)
        except ValueError:
            name = ""
        if not name:
            raise argparse.ArgumentTypeError(f"expected NAME=SHARE, as in train=0.9: {entry!r}")
    return parts
