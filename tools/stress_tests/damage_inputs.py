"""Convert damaged Parquet, Arrow, HDF5 and ArrayRecord, which C libraries parse.

    tools/stress damage [--files N | --minutes N] [--seed S] [--kind KIND]

Small files, written by these libraries, are damaged: bits are flipped, bytes are replaced or moved,
or the end is cut off. They are converted together with undamaged files, in worker processes. The
promises are: the conversion ends in time; each file is listed; an undamaged file gives its samples,
and a damaged file gives none, or the values that the library itself reads from it. If a promise is
broken, the exit code is 1, and the files are kept in --out.
"""

from __future__ import annotations

import itertools
import json
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from stress_tests.program import Deadline, environment, make_parser

N_TOGETHER: Final = 48
LIMIT_S: Final = 120.0
STEP_S: Final = 4.0
"""The step limit in seconds, instead of two minutes, because the files are small."""
ADDRESS_BYTES: Final = 8 << 30
MAX: Final = {"convert": 0, "read": 0}
"""The maximum memory in KiB of the processes that convert and of those that read.

A process is only counted if it had more memory than every process before it.
"""
ROWS: Final[list[dict[str, Any]]] = [
    {
        "x": n * 1000003 if n % 3 else None,
        "y": n / 7,
        "t": f"row {n} \u00fc",
        "v": [float(k) for k in range(n % 5)],
        "s": {"a": n % 2 == 0, "b": b"\0\xff" * (n % 3)},
    }
    for n in range(60)
]


def parquet(path: str, variant: int) -> None:
    """Write Parquet in one of several ways."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.Table.from_pylist(ROWS),
        path,
        compression=("none", "snappy", "zstd", "gzip")[variant % 4],
        use_dictionary=variant % 2 == 0,
        data_page_version=("1.0", "2.0")[variant // 4 % 2],
        write_page_checksum=variant % 8 == 7,
        row_group_size=25,
    )


def arrow(path: str, variant: int) -> None:
    """Write a file, or a stream, of Arrow."""
    import pyarrow as pa

    table = pa.Table.from_pylist(ROWS)
    if variant % 4 == 3:
        place = table.schema.get_field_index("t")
        table = table.set_column(place, "t", table["t"].dictionary_encode())
    make = pa.ipc.new_file if variant % 2 else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression=("zstd", None, "lz4", None)[variant % 4])
    with make(path, table.schema, options=options) as file:
        file.write_table(table, 25)


def hdf5(path: str, variant: int) -> None:
    """Write HDF5, with one of several filters."""
    import h5py

    filters = ({}, {"compression": "gzip"}, {"shuffle": True, "fletcher32": True})[variant % 3]
    with h5py.File(path, "w", libver=("earliest", "latest")[variant % 2]) as file:
        file.create_dataset("x", data=np.arange(60), chunks=(16,), **filters)
        file.create_dataset("g/y", data=np.arange(180.0).reshape(60, 3), chunks=(9, 2), **filters)
        file["t"] = [row["t"] for row in ROWS]
        ragged = file.create_dataset("v", (60,), h5py.vlen_dtype("int16"))
        ragged[:] = np.array([np.arange(n % 4) for n in range(60)], object)


def arrayrecord(path: str, variant: int) -> None:
    """Write an ArrayRecord."""
    from array_record.python import array_record_module

    options = ("group_size:1", "group_size:7,zstd:3", "group_size:20,uncompressed")[variant % 3]
    writer = array_record_module.ArrayRecordWriter(path, options)
    for row in ROWS:
        writer.write(repr(row).encode())
    writer.close()


def read_parquet(path: str) -> Iterator[dict[str, Any]]:
    """Rows as pyarrow reads them."""
    import pyarrow.parquet as pq

    yield from (
        pq.ParquetFile(path, page_checksum_verification=True).read(use_threads=False).to_pylist()
    )


def read_arrow(path: str) -> Iterator[dict[str, Any]]:
    """Rows as pyarrow reads them."""
    import pyarrow as pa

    with pa.memory_map(path) as source:
        is_file = source.read_at(6, 0) == b"ARROW1"
        reader: Any = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)
        yield from reader.read_all().to_pylist()


def read_hdf5(path: str) -> Iterator[dict[str, Any]]:
    """Rows as h5py reads them."""
    import h5py

    found: dict[str, Any] = {}
    with h5py.File(path) as file:

        def visit(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset):
                text = h5py.check_string_dtype(node.dtype)
                found[name.replace("/", ".")] = node.asstr()[:] if text else node[:]

        file.visititems(visit)
    for row in range(len(next(iter(found.values())))):
        yield {name: column[row] for name, column in found.items()}


def read_arrayrecord(path: str) -> Iterator[dict[str, Any]]:
    """Yield records as array_record reads them."""
    from array_record.python import array_record_module

    reader = array_record_module.ArrayRecordReader(path)
    for record in reader.read_all():
        yield {"record": record}


KINDS: Final[dict[str, tuple[str, Callable[[str, int], None], Callable[..., Any]]]] = {
    "parquet": ("arrow", parquet, read_parquet),
    "arrow": ("arrow", arrow, read_arrow),
    "h5": ("hdf5", hdf5, read_hdf5),
    "array_record": ("arrayrecord", arrayrecord, read_arrayrecord),
}


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the content of a file with some damage, more often where its metadata lies."""
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        n = len(made)
        at = rng.randrange(n)
        at = rng.choice((at, at, min(at, rng.randrange(1, 400)), max(0, n - rng.randrange(1, 400))))
        at = min(at, n - 1)
        what = rng.randrange(6)
        if what < 3:
            made[at] ^= 1 << rng.randrange(8)
        elif what == 3:
            made[at] = rng.choice((0, 1, 127, 128, 255))
        elif what == 4:
            size = rng.choice((1, 4, 8, 64))
            made[at : at + size] = rng.choice((bytes(size), b"\xff" * size, made[:size]))
        else:
            del made[rng.choice((at, max(1, n - rng.randrange(1, 64)))) :]
        if not made:
            break
    return bytes(made)


def flat(row: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return the Python values of a row by dotted names; a null struct has none."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = value.tolist() if hasattr(value, "tolist") else value
    return found


def convert(folder: str, kind: str, result: str) -> None:
    """Convert in this process, which `started` has started; write the outcome to a file."""
    import shardio
    from shardio.conversion.converter import converter_class

    with mock.patch.object(converter_class(kind), "step_s", STEP_S):
        report = shardio.convert(folder, result + ".out", kind=kind, workers=2, progress=False)
    samples: dict[str, list[dict[str, Any]]] = {}
    with shardio.open(result + ".out") as dataset:
        for sample in dataset:
            own = {n: v for n, v in sample.items() if n not in ("label", "source", "row")}
            samples.setdefault(str(sample["source"]), []).append(flat(own))
    outcomes = {one.name: (one.outcome, one.reason) for one in report.inputs}
    Path(result).write_bytes(pickle.dumps((outcomes, samples)))


def read(result: str, suffix: str, *paths: str) -> None:
    """Read files with their library, in this process; write the rows to a file."""
    found: dict[str, Any] = {}
    for path in paths:
        try:
            found[path] = [flat(row) for row in KINDS[suffix][2](path)]
        except Exception as error:  # noqa: BLE001 - any error that a library raises for damage
            found[path] = repr(error)
    Path(result).write_bytes(pickle.dumps(found))


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))


def started(*arguments: str) -> str:
    """Run `convert` or `read` in a separate process; return the fault of the process, or ""."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(arguments)],
            env=environment(),
            timeout=LIMIT_S,
            capture_output=True,
            preexec_fn=_limit,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end in {LIMIT_S:.0f} s"
    finally:
        if (most := resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) > max(MAX.values()):
            MAX[arguments[0]] = most
    return f"exit code {done.returncode}: {done.stderr[-1500:]}" if done.returncode else ""


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return True if the values of a sample and of a row, other than None, are the same."""
    named = {name: value for name, value in found.items() if value is not None}
    wanted = {name: value for name, value in expected.items() if value is not None}
    return repr(_plain(named)) == repr(_plain(wanted))


def _plain(value: Any) -> Any:
    """Convert integers to floats, because a field may have a wider type than one of its files."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, int | float) and abs(value) < 1 << 53 else value


def try_files(suffix: str, rng: random.Random, place: Path, tally: Counter[str]) -> list[str]:
    """Convert some damaged files of a kind and some undamaged ones; return what is wrong."""
    kind, write, _ = KINDS[suffix]
    source, result = place / "in", place / "result"
    source.mkdir()
    for number in range(N_TOGETHER):
        path = source / f"{number:02}.{suffix}"
        write(str(path), rng.randrange(24))
        if number % 12:
            path.write_bytes(damaged(path.read_bytes(), rng))
    if wrong := started("convert", str(source), kind, str(result)):
        return [f"the conversion: {wrong}"]
    outcomes, samples = pickle.loads(result.read_bytes())
    problems = []
    rows = read_all(
        [str(source / name) for name, (outcome, _) in outcomes.items() if outcome == "converted"],
        suffix,
        place / "read",
    )
    for number, path in enumerate(sorted(source.iterdir())):
        outcome, reason = outcomes.get(path.name, ("missing", ""))
        died = "timed out after" in reason or "processes reading it" in reason
        tally[f"{suffix}: {'sound' if number % 12 == 0 else 'damaged'}, {outcome}"] += 1
        tally[f"{suffix}: ended a worker"] += died
        if number % 12 == 0 and outcome != "converted":
            problems.append(f"{path.name}, which is undamaged: {outcome}: {reason}")
        if outcome == "converted":
            problems += _compared(path.name, samples.get(path.name, []), rows[str(path)])
        elif outcome not in ("broken", "empty") or samples.get(path.name):
            problems.append(f"{path.name}: {outcome}, {len(samples.get(path.name, []))} samples")
    return problems


def read_all(paths: list[str], suffix: str, result: Path) -> dict[str, Any]:
    """Return the rows of each file, or its error; one that crashes the process is read alone."""
    wrong = started("read", str(result), suffix, *paths)
    if not wrong:
        found: dict[str, Any] = pickle.loads(result.read_bytes())
        return found
    if len(paths) == 1:
        return {paths[0]: wrong}
    return {name: rows for path in paths for name, rows in read_all([path], suffix, result).items()}


def _compared(name: str, samples: list[dict[str, Any]], rows: Any) -> Iterator[str]:
    """Compare the samples of a file with the rows that its library reads."""
    if isinstance(rows, str):
        yield f"{name}: {len(samples)} samples, although its library fails: {rows}"
    elif len(rows) != len(samples) or not all(map(same, samples, rows)):
        first = next((pair for pair in zip(samples, rows, strict=False) if not same(*pair)), None)
        yield f"{name}: {len(samples)} samples, its library has {len(rows)} rows; {first}"


def main(arguments: list[str]) -> int:
    """Damage, convert, compare."""
    parser = make_parser("damage", __doc__)
    parser.add_argument(
        "--files",
        type=int,
        default=2000,
        help="number of each kind (default: 2000)",
    )
    parser.add_argument("--kind", choices=[*KINDS], action="append", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("damaged-inputs"), help="for findings")
    options = parser.parse_args(arguments)
    deadline = Deadline(options.minutes)
    kinds = options.kind or [*KINDS]
    tally: Counter[str] = Counter()
    n_wrong, start_s = 0, time.monotonic()
    for i, suffix in enumerate(kinds):
        share = deadline.share(len(kinds) - i)
        for first in itertools.count(step=N_TOGETHER):
            if not share.asks_for(first < options.files):
                break
            rng = random.Random(f"{options.seed} {suffix} {first}")
            place = Path(tempfile.mkdtemp(prefix="damage-", dir="/dev/shm"))
            problems = try_files(suffix, rng, place, tally)
            if problems:
                n_wrong += len(problems)
                kept = options.out / f"{options.seed}-{suffix}-{first}"
                shutil.copytree(place / "in", kept, dirs_exist_ok=True)
                print(f"{kept}:", *problems, sep="\n  ", flush=True)
            shutil.rmtree(place)
    for name, n in sorted(tally.items()):
        print(f"{n:>8,}  {name}")
    most = ", ".join(f"{what} {n_kib >> 10:,} MiB" for what, n_kib in MAX.items())
    print(f"{n_wrong} findings in {time.monotonic() - start_s:.0f} s; most memory: {most}")
    return int(n_wrong > 0)


if __name__ == "__main__":  # a process that `started` has started
    what, *rest = json.loads(sys.argv[1])
    (convert if what == "convert" else read)(*rest)
