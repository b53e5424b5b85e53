"""Where the control groups of this process lie, from its own group up to the topmost it can see.

Every level can set a limit, in either version of the interface, so all of them are looked at. All
functions take the root of the file system, so that tests can show them another machine.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

__all__ = ["Level", "levels", "read_number", "read_text"]

_ESCAPE = re.compile(r"\\([0-7]{3})")


class Level(NamedTuple):
    """One control group: `version` (1 or 2) of its interface, and its folder."""

    version: int
    folder: str


def levels(controller: str, root: str = "/") -> list[Level]:
    """List the groups that may limit this process through `controller`, its own group first.

    A version 2 group is listed whether or not the controller is switched on in it: its files are
    then missing. Empty where there are no control groups.
    """
    places = _places(read_text(os.path.join(root, "proc/self/cgroup")), controller)
    found = []
    for line in read_text(os.path.join(root, "proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        mount, kind = left.split(), right.split()
        if len(mount) < 5 or len(kind) < 3:
            continue
        version = _version(kind[0], kind[2].split(","), controller)
        if version in places:
            mounted_group, mount_point = (_unescape(text) for text in mount[3:5])
            top = os.path.join(root, mount_point.lstrip("/"))
            below = _below(places[version], mounted_group)
            found += [Level(version, folder) for folder in _upwards(top, below)]
            del places[version]  # a second mount of the same tree says nothing new
    return found


def read_text(path: str) -> str:
    """Read a small file of the kernel's; "" where there is none or it must not be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def read_number(path: str) -> int | None:
    """Read a file that holds one integer; None where it is missing or says "max"."""
    text = read_text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _places(text: str, controller: str) -> dict[int, str]:
    """Find this process's group in each version's tree, from lines `id:controllers:group`."""
    places = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            places[2] = group
        elif controller in controllers.split(","):
            places[1] = group
    return places


def _version(kind: str, options: list[str], controller: str) -> int:
    if kind == "cgroup2":
        return 2
    return 1 if kind == "cgroup" and controller in options else 0


def _below(group: str, mounted_group: str) -> str:
    """Say where `group` lies below the group that is mounted; "" for the mounted group itself.

    In a container the mounted group is often the process's own, and a group outside what the
    container sees is given as `/../…`: the mounted group is then all there is to look at.
    """
    below = os.path.relpath(group, mounted_group)
    return "" if below == "." or below.startswith("..") or "/.." in group else below


def _upwards(top: str, below: str) -> list[str]:
    parts = below.split("/") if below else []
    return [os.path.join(top, *parts[:n]) for n in range(len(parts), -1, -1)]


def _unescape(text: str) -> str:
    """Undo the octal escapes of spaces and the like in mountinfo."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
