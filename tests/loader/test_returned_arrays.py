"""Values that user code returns: tensors of torch become arrays, masked arrays are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Batch, List, Schema, ShardLoader, WeightedSampler
from shardio.errors import InvalidArgument, SchemaError, TransformError
from tests.loading import WORKERS, bits

N, BATCH = 12, 4
Fields = dict[str, Any]
TAKERS = pytest.mark.parametrize("taker", ["transform", "batch_transform", "collate"])


def epoch(folder: str, **options: Any) -> list[Any]:
    options = {"output": "numpy", "num_workers": 0, **options}
    with ShardLoader(folder, BATCH, **options) as loader:
        return [bits(batch) for batch in loader]


def made_by(taker: str, make: Callable[[int], Any]) -> Callable[[Any], Fields]:
    """Return a function for `taker` that returns make(label) for every sample."""
    if taker == "transform":
        return lambda sample: {"x": make(int(sample["label"]))}
    if taker == "collate":
        return lambda samples: {"x": [make(int(sample["label"])) for sample in samples]}
    return lambda batch: {"x": [make(int(label)) for label in batch["label"]]}


MASKED: dict[str, Callable[[], Any]] = {
    "array": lambda: np.ma.masked_array([1.0, 2.0], [False, True]),
    "nothing masked": lambda: np.ma.masked_array([1.0, 2.0]),
    "list of arrays": lambda: [np.zeros(2), np.ma.masked_array([1.0, 2.0], [False, True])],
}
MESSAGE = r"'x(\[\d\])*'.*a masked array would lose its mask.*\.filled\(.*getmaskarray"
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
    shardio.maintenance.add_column(out, "x", schema["x"], [each["x"] for each in samples])


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


WRITING: dict[str, Callable[[list[Fields], Schema, Path], object]] = {
    "iterable": lambda samples, schema, out: shardio.convert(iter(samples), out),
    "schema": lambda samples, schema, out: shardio.convert(iter(samples), out, schema=schema),
    "append": append_iterable,
    "writer": write,
    "column": add_column,
    "pandas": convert_pandas,
    "polars": convert_polars,
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("writing", WRITING)
@EVERY_MASKED
def test_masked_arrays_are_not_written(tmp_path: Path, kind: str, writing: str, place: int) -> None:
    is_list = kind == "list of arrays"
    element = Array("float64", (None,) if is_list else (2,))
    schema = Schema({"x": List(element) if is_list else element})
    samples = [{"x": [np.zeros(2), np.ones(2)] if is_list else np.ones(2)} for _ in range(3)]
    samples[place] = {"x": MASKED[kind]()}
    with pytest.raises(SchemaError, match=MESSAGE):
        WRITING[writing](samples, schema, tmp_path / "out")


@pytest.mark.parametrize(
    "value",
    [[1.0, np.ma.masked], [np.ma.masked_array([1.0], [True]), [2.0]], ([1.0], (np.ma.masked,))],
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
        for rows, fields in ((mask, []), (lambda columns: mask, ["label"]), (numbers, [])):
            with pytest.raises(InvalidArgument, match="masked array"):
                dataset.select(rows, fields=fields)
    for sampler in (WeightedSampler(np.ma.ones(N)), numbers):
        with pytest.raises(InvalidArgument, match="(weights|sampler).*masked array"):
            epoch(folder, sampler=sampler)


def stand_in(array: np.ndarray[Any, Any], device: str = "cpu", layout: str = "strided") -> Any:
    """Make an object with the class name and the methods of a tensor that requires a gradient."""

    def numpy(self: Any, *, force: bool = False) -> Any:
        assert force
        return array

    members = {
        "__module__": "torch",
        "__array__": None,  # as of one that cannot be read without `force`
        "numpy": numpy,
        "dtype": f"torch.{array.dtype}",
        "device": SimpleNamespace(type=device, __str__=lambda: device),
        "layout": f"torch.{layout}",
    }
    return type("Tensor", (), members)()


def numbers(label: int) -> np.ndarray[Any, Any]:
    return np.arange(6, dtype=np.float32).reshape(2, 3) + label


@WORKERS
@TAKERS
def test_a_tensor_is_its_array_without_torch(folder: str, taker: str, num_workers: int) -> None:
    options: Fields = {"num_workers": num_workers}
    tensors = made_by(taker, lambda label: stand_in(numbers(label)))
    found = epoch(folder, **options, **{taker: tensors})
    assert found == epoch(folder, **options, **{taker: made_by(taker, numbers)})


@TAKERS
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"device": "cuda"}, r"expected a tensor on the CPU, found one on cuda.*x\.cpu\(\)"),
        ({"layout": "sparse_coo"}, r"expected a dense tensor, found .*sparse_.*to_dense\(\)"),
    ],
    ids=["cuda", "sparse"],
)
def test_a_tensor_that_is_no_array_is_refused(
    folder: str, taker: str, attributes: dict[str, str], text: str, first: int
) -> None:
    def make(label: int) -> Any:
        return stand_in(numbers(label), **attributes) if label == first else numbers(label)

    with pytest.raises(TransformError, match=r"'x(\[\d\])*': " + text) as caught:
        epoch(folder, **{taker: made_by(taker, make)})
    assert f" of {folder}" in str(caught.value)


def test_what_user_code_keeps_is_not_changed(folder: str) -> None:
    kept: list[Fields] = []

    def transform(sample: Fields) -> Fields:
        kept.append({"x": stand_in(numbers(0)), "y": [stand_in(numbers(1))]})
        return kept[-1]

    epoch(folder, transform=transform)
    assert {type(each["x"]).__name__ for each in kept} == {"Tensor"}
    assert {type(each["y"][0]).__name__ for each in kept} == {"Tensor"}


def tensor_kinds() -> dict[str, Callable[[int], Any]]:
    import torch

    def of(label: int) -> Any:
        return torch.arange(6, dtype=torch.float32).reshape(2, 3) + label

    return {
        "plain": of,
        "with a gradient": lambda label: of(label).requires_grad_() * 2,
        "parameter": lambda label: torch.nn.Parameter(of(label)),
        "transposed": lambda label: of(label).T,
        "strided": lambda label: of(label)[:, ::2],
        "expanded": lambda label: of(label)[:, :1].expand(2, 5),
        "negative view": lambda label: torch.complex(of(label), of(label)).conj().imag,
        "without dimensions": lambda label: of(label).sum(),
        "int64": lambda label: of(label).long(),
        "bool": lambda label: of(label) > 3,
        "uint8": lambda label: of(label).to(torch.uint8),
        "float16": lambda label: of(label).half(),
        "list": lambda label: [of(label), of(label)],
        "list with arrays": lambda label: (of(label), of(label).numpy()),
    }


NEEDS_TORCH = "torch is too large for the extra dev"


def as_arrays(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [as_arrays(each) for each in value]
    return value if isinstance(value, np.ndarray) else value.numpy(force=True).copy()


@pytest.mark.external
@pytest.mark.parametrize(
    "running",
    [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "start_method": "thread"}],
    ids=["here", "1 worker", "threads"],
)
@TAKERS
def test_tensors_of_torch_become_arrays(folder: str, taker: str, running: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason=NEEDS_TORCH)

    def tensors(given: Any) -> Fields:
        if taker == "transform":
            return {kind: make(int(given["label"])) for kind, make in tensor_kinds().items()}
        labels = [each["label"] for each in given] if taker == "collate" else given["label"]
        return {kind: [make(int(i)) for i in labels] for kind, make in tensor_kinds().items()}

    def arrays(given: Any) -> Fields:
        return {kind: as_arrays(value) for kind, value in tensors(given).items()}

    found = epoch(folder, **running, **{taker: tensors})
    assert found == epoch(folder, **running, **{taker: arrays})
    assert len(found[0][-1]) == len(tensor_kinds())


@pytest.mark.external
@pytest.mark.parametrize("num_workers", [0, 1])
@TAKERS
def test_a_tensor_of_bfloat16_arrives_as_one(folder: str, taker: str, num_workers: int) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)

    def make(label: int) -> Any:
        import torch

        return (torch.full((3, 2), label + 0.5, dtype=torch.bfloat16).requires_grad_() * 1).T

    options: Fields = {"output": "torch", "num_workers": num_workers, taker: made_by(taker, make)}
    with ShardLoader(folder, BATCH, **options) as loader:
        batches: list[Batch[Any]] = list(loader)
    if taker == "transform":
        found = torch.cat([batch["x"] for batch in batches])
        assert found.dtype == torch.bfloat16 and found.shape == (N, 2, 3)
        assert found[:, 1, 2].tolist() == [label + 0.5 for label in range(N)]
    else:
        rows = [row for batch in batches for row in batch["x"]]
        assert {row.dtype for row in rows} == {torch.bfloat16}
        assert [row[1, 2].item() for row in rows] == [label + 0.5 for label in range(N)]


@pytest.mark.external
def test_bits_of_bfloat16_are_not_taken_for_whole_numbers(folder: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    half = torch.ones(2, dtype=torch.bfloat16)

    def transform(sample: Fields) -> Fields:
        return {"x": half if sample["label"] == 5 else np.ones(2, np.uint16)}

    with pytest.raises(TransformError, match=r"had uint16 of shape \(2,\), this has bfloat16"):
        epoch(folder, transform=transform)
    with pytest.raises(SchemaError, match="expected dtype uint16, found bfloat16"):
        write([{"x": half}], Schema({"x": Array("uint16", (2,))}), tmp_path / "out")


@pytest.mark.external
@pytest.mark.parametrize("kind", ["sparse", "float8", "meta", "complex"])
def test_a_tensor_of_torch_may_be_no_array(folder: str, tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    tensor, text = {
        "sparse": (torch.eye(2).to_sparse(), r"expected a dense tensor, found .*to_dense\(\)"),
        "float8": (torch.ones(2).to(torch.float8_e4m3fn), r"torch\.float8_e4m3fn.*\.float\(\)"),
        "meta": (torch.ones(2, device="meta"), "expected a tensor on the CPU, found one on meta"),
        "complex": (torch.ones(2, dtype=torch.complex64), "dtype complex64"),
    }[kind]
    with pytest.raises(TransformError, match=f"'x': .*{text}"):
        epoch(folder, transform=lambda sample: {"x": tensor})
    with pytest.raises(SchemaError, match=f"'x': .*({text}|expected dtype)"):
        write([{"x": tensor}], Schema({"x": Array("float32", (2,))}), tmp_path / "out")


@pytest.mark.external
@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_default_collate_is_a_collate_function(folder: str, num_workers: int) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    collate = torch.utils.data.default_collate
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = epoch(folder, collate=collate, num_workers=num_workers)
    assert found == epoch(folder)


@pytest.mark.external
def test_pictures_that_torch_cannot_stack_are_to_be_resized(folder: str) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    sizes = iter(range(1, 100))
    options: dict[str, Any] = {"collate": torch.utils.data.default_collate}
    options["transform"] = lambda sample: {"x": np.zeros(next(sizes), np.float32)}
    with pytest.raises(TransformError, match=r"transform=v2\.Resize\(\(height, width\)\)"):
        epoch(folder, **options)


@pytest.mark.external
def test_a_batch_transform_is_given_arrays_whatever_collate_returns(folder: str) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    kinds = set[type]()

    def look(batch: Fields) -> Fields:
        kinds.update(type(value) for value in batch.values())
        return batch

    collate = torch.utils.data.default_collate
    assert epoch(folder, collate=collate, batch_transform=look) == epoch(folder)
    assert kinds == {np.ndarray}


@pytest.mark.external
def test_a_writer_takes_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    fields = {"x": Array("float32", (2,)), "half": Array("bfloat16", (2,))}
    schema = Schema({**fields, "each": List(Array("int64", (None,)))})
    x = torch.ones(2, requires_grad=True) * 3
    write([{"x": x, "half": x.bfloat16(), "each": [x.long()]}], schema, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        sample = dataset[0]
    assert sample["x"].tolist() == [3, 3] and sample["each"][0].tolist() == [3, 3]
    bits_of = torch.from_numpy(sample["half"].copy()).view(torch.bfloat16)
    assert bits_of.tolist() == [3, 3]


@pytest.mark.external
def test_a_field_of_one_array_refuses_a_list_of_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(SchemaError, match="'x': expected float32, found list: .*requires grad"):
        write([{"x": [x, x]}], Schema({"x": Array("float32", (2, 2))}), tmp_path / "out")
