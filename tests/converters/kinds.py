"""A file of each kind that has columns, of whole numbers: what every converter is tested with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.converters.test_mds import shard
from tests.converters.test_records import example, framed, ints, write_array_record
from tests.converters.test_webdataset import tar

Columns = Mapping[str, Sequence[Any]]
"""By name; all have as many rows."""


def rows_of(columns: Columns) -> Iterator[dict[str, int]]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _write_csv(path: Path, columns: Columns) -> None:
    lines = [",".join(columns), *(",".join(map(str, row.values())) for row in rows_of(columns))]
    path.write_text("\n".join(lines))


def _write_parquet(path: Path, columns: Columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(dict(columns)), path)


def _write_arrow(path: Path, columns: Columns) -> None:
    import pyarrow as pa

    table = pa.table(dict(columns))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def _write_tar(path: Path, columns: Columns) -> None:
    """Members end in .cls: that says that they are numbers."""
    members = (
        (f"{i}.{name}.cls", b"%d" % value)
        for i, row in enumerate(rows_of(columns))
        for name, value in row.items()
    )
    path.write_bytes(tar(dict(members)))


def _write_mds(path: Path, columns: Columns) -> None:
    samples = [{name: b"%d" % n for name, n in row.items()} for row in rows_of(columns)]
    path.write_bytes(shard(samples, dict.fromkeys(columns, "str_int")))


def _examples(columns: Columns) -> list[bytes]:
    return [example(**{name: ints(n) for name, n in row.items()}) for row in rows_of(columns)]


def _write_safetensors(path: Path, columns: Columns) -> None:
    from safetensors.numpy import save_file

    save_file(_arrays(columns), path)


def _write_hdf5(path: Path, columns: Columns) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in _arrays(columns).items():
            file[name.replace(".", "/")] = array


def _write_zarr(path: Path, columns: Columns) -> None:
    import zarr

    group = zarr.open_group(path, mode="w")
    for name, array in _arrays(columns).items():
        group.create_array(name.replace(".", "/"), data=array)


def _arrays(columns: Columns) -> dict[str, Any]:
    return {name: np.asarray(values) for name, values in columns.items()}


WRITERS: Final[Mapping[str, Callable[[Path, Columns], object]]] = {
    "csv": _write_csv,
    "jsonl": lambda path, columns: path.write_text("\n".join(map(json.dumps, rows_of(columns)))),
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "tar": _write_tar,
    "mds": _write_mds,
    "tfrecord": lambda path, columns: path.write_bytes(framed(_examples(columns))),
    "array_record": lambda path, columns: write_array_record(path, _examples(columns)),
    "npz": lambda path, columns: np.savez(path, **_arrays(columns)),
    "safetensors": _write_safetensors,
    "h5": _write_hdf5,
    "zarr": _write_zarr,
}
"""Functions that write a file, by its suffix."""
