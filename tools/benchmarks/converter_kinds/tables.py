"""Tables, as `csv`, `json` and pyarrow load them: all values of a row, arrays of numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from benchmarks.converter_kinds.kind import Kind

_N_ROWS: Final = 20_000


def _flat(rng: Random, number: int) -> dict[str, Any]:
    words = "a caption of several words, " * 2
    numbers = {"x": rng.random(), "y": rng.random(), "ok": True}
    return {"id": number, **numbers, "name": f"name {number}", "caption": words}


def _nested(rng: Random, number: int) -> dict[str, Any]:
    camera = {"a": 1, "pose": [1.0, rng.random()]}
    return {"id": number, "camera": camera, "tokens": [*range(number % 20)]}


def _embedding(rng: Random, number: int) -> dict[str, Any]:
    return {"id": number, "x": [rng.random() for _ in range(128)]}


def _talk(_: Random, number: int) -> dict[str, Any]:
    said = [{"from": "human", "value": "hello there"}, {"from": "model", "value": "words " * 20}]
    return {"id": number, "talk": said}


def _make_csv(place: Path) -> None:
    rng = Random(0)
    with open(place / "one.csv", "w", newline="") as file:
        rows = [_flat(rng, number) for number in range(_N_ROWS)]
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _make_jsonl(row: Callable[[Random, int], dict[str, Any]], place: Path) -> None:
    rng = Random(0)
    with open(place / "one.jsonl", "w") as file:
        for number in range(_N_ROWS):
            file.write(json.dumps(row(rng, number)) + "\n")


def _load_csv(path: str) -> Iterator[Any]:
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found: dict[str, Any] = dict(row)
            found["id"], found["ok"] = int(row["id"]), row["ok"] == "True"
            found["x"], found["y"] = float(row["x"]), float(row["y"])
            yield found


def _load_jsonl(path: str) -> Iterator[Any]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            for name in row.keys() & {"tokens", "x"}:
                if type(row[name]) is list:
                    row[name] = np.array(row[name])
            if "camera" in row:
                row["camera"]["pose"] = np.array(row["camera"]["pose"])
            yield row


# --- pyarrow ---------------------------------------------------------------------------------


def _numbers(rng: np.random.Generator) -> dict[str, Any]:
    columns = {f"x{number}": rng.random(60_000) for number in range(8)}
    return {**columns, "y": rng.integers(0, 9, 60_000)}


def _texts(_: np.random.Generator) -> dict[str, Any]:
    texts = [f"some text of forty characters or about {number}" for number in range(60_000)]
    return {"text": texts, "id": np.arange(60_000), "maybe": [None, 1, 2] * 20_000}


def _bytes(rng: np.random.Generator) -> dict[str, Any]:
    return {"data": [rng.bytes(2_000) for _ in range(15_000)]}


def _tokens(rng: np.random.Generator) -> dict[str, Any]:
    return {"tokens": [rng.integers(0, 999, 100) for _ in range(15_000)]}


def _records(_: np.random.Generator) -> dict[str, Any]:
    return {"a": [{"n": number, "b": [{"x": number}]} for number in range(30_000)]}


def _make_parquet(columns: Callable[[np.random.Generator], dict[str, Any]], place: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns(np.random.default_rng(0))), place / "one.parquet")


def _make_stream(columns: Callable[[np.random.Generator], dict[str, Any]], place: Path) -> None:
    import pyarrow as pa

    table = pa.table(columns(np.random.default_rng(0)))
    with pa.OSFile(str(place / "one.arrow"), "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1_000)


def _load_parquet(path: str) -> Iterable[Any]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(use_threads=False):
        yield from batch.to_pylist()


def _load_stream(path: str) -> Iterable[Any]:
    import pyarrow as pa

    for batch in pa.ipc.open_stream(pa.memory_map(path)):
        yield from batch.to_pylist()


_COLUMNS: Final = {
    "numbers": _numbers,
    "texts": _texts,
    "bytes": _bytes,
    "tokens": _tokens,
    "records": _records,
}
KINDS: Final = {
    "csv": Kind("tables", _make_csv, _load_csv),
    "json flat": Kind("tables", partial(_make_jsonl, _flat), _load_jsonl),
    "json nested": Kind(
        "tables", partial(_make_jsonl, _nested), _load_jsonl, least=0.55, why="fields are named"
    ),
    "json arrays": Kind("tables", partial(_make_jsonl, _embedding), _load_jsonl),
    "json in json": Kind(
        "tables",
        partial(_make_jsonl, _talk),
        _load_jsonl,
        least=0.35,
        why="JSON is encoded again",
    ),
    **{
        f"parquet {name}": Kind("arrow", partial(_make_parquet, columns), _load_parquet)
        for name, columns in _COLUMNS.items()
    },
    **{
        f"arrow {name}": Kind(
            "arrow",
            partial(_make_stream, columns),
            _load_stream,
            least=0.35 if name in {"texts", "records"} else 0.7,
            why="batches are validated" if name in {"texts", "records"} else "",
        )
        for name, columns in _COLUMNS.items()
    },
}
