"""Measure how fast files are read for a conversion, beside the libraries that read such files.

    python tools/dev/bench_converters.py [--only NAME,NAME] [--list]

Each line: a folder of one kind of file in memory, the best of five turns of the library's own
loop, of the converter's, and the first divided by the second; the turns alternate. Seconds are
the processor's, of all threads, so what else runs on the machine counts for little. The library's
loop gives what one trains with: every value of every sample, in Python's or NumPy's terms. A kind
whose library is not installed is passed over, and named. Ends with 1 if a quotient is below 0.7,
or below the bar of their own that a few kinds have, for the reason that their line gives.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # no wheel holds what is here

from dev.converter_kinds import arrays, episodes, media, records, shards, stores, tables
from dev.converter_kinds.kind import Kind
from shardio import Input
from shardio.conversion.converter import fit_converter, make_converter
from shardio.conversion.inputs import join_parts, list_inputs

N_TURNS: Final = 5
KINDS: Final = {
    name: kind
    for some in (arrays, stores, records, tables, shards, episodes, media)
    for name, kind in some.KINDS.items()
}


def main() -> int:
    """Measure every kind of file, or those named."""
    parser = argparse.ArgumentParser(description="converters beside the libraries of their files")
    parser.add_argument("--only", default=",".join(KINDS), help="names, with commas between them")
    parser.add_argument("--list", action="store_true", help="say the names, and measure nothing")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(KINDS)}")
    if options.list:
        print("\n".join(names))
        return 0
    is_slow = False
    for name in names:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            try:
                quotient = _measure(name, KINDS[name], Path(folder))
            except ModuleNotFoundError as error:
                print(f"{name:16} not measured: {error}", flush=True)
                continue
            is_slow |= quotient < KINDS[name].least
    return int(is_slow)


def _measure(name: str, kind: Kind, place: Path) -> float:
    kind.make(place)
    source = make_converter(kind.converter, kind.options)
    files = [one for one in join_parts(list_inputs(str(place)), source).inputs if not one.part_of]
    converter = fit_converter(source, files)
    library, ours = [], []
    for _ in range(N_TURNS):
        library.append(_seconds(lambda one: kind.load(one.path), files))
        ours.append(_seconds(converter.samples, files))
    best, own = min(library), min(ours)
    said = f"{name:16} library {best:.3f} s, converter {own:.3f} s: {best / own:.2f}"
    why = f" (at least {kind.least}: {kind.why})" if kind.why else ""
    print(said + why + (" BELOW" if best / own < kind.least else ""), flush=True)
    return best / own


def _seconds(read: Callable[[Input], Iterable[Any]], files: list[Input]) -> float:
    start_s = time.process_time()
    for one in files:
        for _ in read(one):
            pass
    return time.process_time() - start_s


if __name__ == "__main__":
    sys.exit(main())
