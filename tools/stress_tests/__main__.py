"""Break things, and check that shardio keeps its promises about what is left.

    tools/stress --list
    tools/stress NAME [--minutes N] [--seed S]    more options: tools/stress NAME --help

A program exits with 1 if a promise was broken. With --minutes, it continues until the time is over;
without, it does a fixed amount of work, which its help states.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Final

PROGRAMS: Final = {
    "workers": "kill_workers",
    "operations": "kill_operations",
    "conversion": "kill_conversion",
    "disk": "fail_disk",
    "flips": "flip_every_bit",
    "fuzz": "fuzz",
    "damage": "damage_inputs",
    "many-files": "convert_many",
    "soak": "soak",
    "view": "click_viewer",
}


def descriptions() -> dict[str, str]:
    """Return the first line of each program's docstring, without importing the program."""
    found = {}
    for name, module in PROGRAMS.items():
        tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text("utf-8"))
        found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Run a program; return its exit code."""
    if arguments[:1] == ["--list"]:
        for name, description in descriptions().items():
            print(f"{name:<12}{description}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in PROGRAMS:
        print(f"tools/stress: {name}: expected one of {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"stress_tests.{PROGRAMS[name]}").main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
