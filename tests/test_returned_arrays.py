"""Values that user code returns: tensors of torch become arrays, masked arrays are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, List, Schema, ShardLoader
from shardio.errors import InvalidArgument, SchemaError, TransformError
from tests.loading import TWO_FIELDS, bits, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N, BATCH = 12, 4
Fields = dict[str, Any]
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
TAKERS = pytest.mark.parametrize("taker", ["transform", "batch_transform", "collate"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """N samples of two fields in 2 shards."""
    path = tmp_path_factory.mktemp("returned") / "set"
    return write_dataset(path, N, 2, TWO_FIELDS, two_fields(N))


def epoch(folder: str, **options: Any) -> list[Any]:
    options = {"output": "numpy", "num_workers": 0, **options}
    with ShardLoader(folder, BATCH, **options) as loader:
        return [bits(batch) for batch in loader]


def made_by(taker: str, make: Callable[[int], Any]) -> Callable[[Any], Fields]:
    """A function for `taker` that returns make(label) for every sample."""
    if taker == "transform":
        return lambda sample: {"x": make(int(sample["label"]))}
    if taker == "collate":
        return lambda samples: {"x": [make(int(sample["label"])) for sample in samples]}
    return lambda batch: {"x": [make(int(label)) for label in batch["label"]]}


# --- masked arrays --------------------------------------------------------------------------

MASKED: dict[str, Callable[[], Any]] = {
    "array": lambda: np.ma.masked_array([1.0, 2.0], [False, True]),
    "nothing masked": lambda: np.ma.masked_array([1.0, 2.0]),
    "list of arrays": lambda: [np.zeros(2), np.ma.masked_array([1.0, 2.0], [False, True])],
}
MESSAGE = r"'x(\[1\])?'.*a masked array would lose its mask.*\.filled\(.*getmaskarray"
EVERY_MASKED = pytest.mark.parametrize("kind", MASKED)


@WORKERS
@TAKERS
@EVERY_MASKED
@pytest.mark.parametrize("first", [0, 5])
def test_a_masked_array_that_a_loaders_function_returns_is_refused(
    folder: str, taker: str, kind: str, first: int, num_workers: int
) -> None:
    plain: Any = [np.zeros(2), np.ones(2)] if kind == "list of arrays" else np.ones(2)

    def make(label: int) -> Any:
        return MASKED[kind]() if label == first else plain

    with pytest.raises(TransformError, match=MESSAGE) as caught:
        epoch(folder, **{taker: made_by(taker, make)}, num_workers=num_workers)
    assert f" of {folder}" in str(caught.value)


@pytest.mark.parametrize("taker", ["batch_transform", "collate"])
@pytest.mark.parametrize("first", [0, 4])
def test_a_masked_array_of_a_whole_batch_is_refused(folder: str, taker: str, first: int) -> None:
    def make(given: Any) -> Fields:
        labels = [each["label"] for each in given] if isinstance(given, list) else given["label"]
        return {"x": np.ma.masked_equal(labels, first) if first in labels else np.array(labels)}

    with pytest.raises(TransformError, match=MESSAGE):
        epoch(folder, **{taker: make})


def test_a_masked_array_costs_its_sample_where_samples_may_be_skipped(folder: str) -> None:
    def make(label: int) -> Any:
        return MASKED["array"]() if label == 5 else np.full(2, float(label))

    options: Fields = {"on_error": "skip", "max_skips": 1, "output": "numpy", "num_workers": 0}
    with ShardLoader(folder, BATCH, transform=made_by("transform", make), **options) as loader:
        skipped = [each for batch in loader for each in batch.skipped]
    assert [each.index for each in skipped] == [5]
    assert "would lose its mask" in skipped[0].text


class Indexed:
    """A data set of samples by number."""

    def __init__(self, samples: Sequence[Fields]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Fields:
        return self.samples[i]


def convert_iterable(samples: list[Fields], schema: Schema, out: Path) -> None:
    shardio.convert(iter(samples), out)


def convert_with_schema(samples: list[Fields], schema: Schema, out: Path) -> None:
    shardio.convert(iter(samples), out, schema=schema)


def append_iterable(samples: list[Fields], schema: Schema, out: Path) -> None:
    plain = {"x": np.zeros(2) if isinstance(schema["x"], Array) else [np.zeros(2)]}
    shardio.convert(iter([plain]), out, schema=schema)
    shardio.convert(iter(samples), out, append=True)


def write(samples: list[Fields], schema: Schema, out: Path) -> None:
    with shardio.DatasetWriter(out, schema) as writer:
        for sample in samples:
            writer.append(sample)


def add_column(samples: list[Fields], schema: Schema, out: Path) -> None:
    shardio.convert([{"i": i} for i in range(len(samples))], out)
    shardio.surgery.add_column(out, "x", schema["x"], [each["x"] for each in samples])


def convert_pandas(samples: list[Fields], schema: Schema, out: Path) -> None:
    pd = pytest.importorskip("pandas", reason="its frames are converted")
    values = np.empty(len(samples), object)
    for i, sample in enumerate(samples):
        values[i] = sample["x"]
    shardio.convert(pd.DataFrame({"x": values}), out)


def convert_polars(samples: list[Fields], schema: Schema, out: Path) -> None:
    pl = pytest.importorskip("polars", reason="its frames are converted")
    values = pl.Series("x", [each["x"] for each in samples], dtype=pl.Object)
    shardio.convert(pl.DataFrame([values]), out)


WRITING = [
    convert_iterable,
    convert_with_schema,
    append_iterable,
    write,
    add_column,
    convert_pandas,
    convert_polars,
]


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("writing", WRITING, ids=lambda each: each.__name__)
@EVERY_MASKED
def test_a_masked_array_is_never_written(
    tmp_path: Path, kind: str, writing: Callable[..., None], place: int
) -> None:
    is_list = kind == "list of arrays"
    element = Array("float64", (None,) if is_list else (2,))
    schema = Schema({"x": List(element) if is_list else element})
    samples = [{"x": [np.zeros(2), np.ones(2)] if is_list else np.ones(2)} for _ in range(3)]
    samples[place] = {"x": MASKED[kind]()}
    with pytest.raises(SchemaError, match=MESSAGE):
        writing(samples, schema, tmp_path / "out")


@WORKERS
@EVERY_MASKED
def test_a_masked_array_costs_its_item_where_samples_come_by_number(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    plain: Any = [np.zeros(2), np.ones(2)] if kind == "list of arrays" else np.ones(2)
    samples = [{"x": plain}, {"x": MASKED[kind]()}, {"x": plain}]
    report = shardio.convert(Indexed(samples), tmp_path / "out", workers=num_workers)
    assert [one.outcome for one in report.inputs] == ["converted", "broken", "converted"]
    assert "would lose its mask" in (report.inputs[1].reason or "")


@pytest.mark.parametrize(
    "value",
    [
        [1.0, np.ma.masked],
        [np.ma.masked_array([1.0], [True]), [2.0]],
        ([1.0], (np.ma.masked,)),
    ],
    ids=["constant", "rows", "nested"],
)
def test_masked_arrays_inside_the_lists_of_an_array_are_refused(tmp_path: Path, value: Any) -> None:
    shape = np.zeros((2, 1)).shape if isinstance(value[1], list | tuple) else (2,)
    with pytest.raises(SchemaError, match="'x'.*would lose its mask"):
        write([{"x": value}], Schema({"x": Array("float64", shape)}), tmp_path / "out")


def test_a_masked_array_chooses_no_samples(folder: str) -> None:
    mask = np.ma.masked_array(np.arange(N) > 3, np.arange(N) == 5)
    numbers = np.ma.masked_array([1, 2], [True, False])
    with shardio.open(folder) as dataset:
        for options in (
            {"mask": mask},
            {"where": lambda columns: mask, "fields": "label"},
            {"indices": numbers},
        ):
            with pytest.raises(InvalidArgument, match="masked array"):
                dataset.select(**options)
    for options in ({"weights": np.ma.ones(N)}, {"sampler": numbers}):
        with pytest.raises(InvalidArgument, match="(weights|sampler).*masked array"):
            epoch(folder, **options)
