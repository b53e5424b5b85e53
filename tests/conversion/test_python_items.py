"""Items converted by a function, and map-style data sets converted by position."""

from __future__ import annotations

import collections
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Bytes, Image, InvalidArgument, Json, List, Schema, Text
from shardio.conversion import python_samples
from shardio.conversion.report import Progress, progress_state
from shardio.errors import SchemaError, UnsupportedEnvironment
from shardio.media import decode_image
from tests.lines import column

pytestmark = pytest.mark.usefixtures("warm_zygote")

PIL = pytest.importorskip("PIL.Image", reason="pictures are Pillow's")


def numbers(n: int) -> Iterator[dict[str, Any]]:
    for k in range(n):
        yield {"n": n, "square": np.full(2, k * k, np.float32)}


def of_shard(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.shard"))}


def test_samples_of_items_keep_their_order_for_any_number_of_workers(tmp_path: Path) -> None:
    lots = 3  # a closure, as of a notebook

    def make(n: int) -> Iterator[dict[str, Any]]:
        for k in range(n % lots):
            yield {"n": n, "k": k}

    here, there = tmp_path / "here", tmp_path / "there"
    report = shardio.convert(range(200), here, samples=make, workers=0)
    shardio.convert(range(200), there, samples=make, workers=2)
    assert column(here, "n") == [n for n in range(200) for _ in range(n % 3)]
    assert of_shard(here) == of_shard(there)
    assert (report.kind, report.counts) == ("items", {"converted": 133, "empty": 67})
    assert ": ratio" not in report._repr_html_()  # of samples to the pickles of items
    assert report.inputs[1].name == "1" and report.inputs[0].reason == "gave no sample"
    with shardio.open(here) as dataset:
        assert dataset.converter["name"] == "items"
        assert dataset.converter["options"]["function"].endswith("make")


def test_a_function_may_return_one_sample_or_none(tmp_path: Path) -> None:
    make = {"a": {"x": 1}, "b": None, "c": {"x": 3}}.get
    report = shardio.convert(["a"], tmp_path / "0", samples=lambda _: {"x": 0})
    assert report.n_samples == 1
    report = shardio.convert(["b", "a", "c"], tmp_path / "1", samples=make, workers=0)
    assert column(tmp_path / "1", "x") == [1, 3]
    assert [one.outcome for one in report.inputs] == ["empty", "converted", "converted"]


def test_a_sample_may_have_bytes_text_json_and_lists(tmp_path: Path) -> None:
    known = {"raw": b"no media", "text": "\u00fc", "json": {"a": [None, "b"]}, "none": b""}
    fields = {"raw": Bytes(), "text": Text(), "json": Json(), "none": Bytes()}
    schema = Schema({**fields, "list": List(Array("uint8", (None,)))})
    for name, given in (("inferred", None), ("given", schema)):
        sample = known if given is None else {**known, "list": []}
        report = shardio.convert(
            [0], tmp_path / name, samples={0: sample}.get, workers=0, schema=given
        )
        assert report.counts == {"converted": 1}
        with shardio.open(tmp_path / name) as dataset:
            assert dict(dataset[0]) == sample


@pytest.mark.parametrize("source", [3, numbers, object()])
def test_a_source_that_is_not_iterable_is_refused(source: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="found .*; expected a path, an iterable of"):
        shardio.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("progress", [None, False, lambda state: None])
def test_broken_items_are_a_warning_unless_the_caller_decides_what_is_shown(
    tmp_path: Path, progress: Any
) -> None:
    values = [{"x": np.zeros(n)} for n in (5, 5, 6, 7)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = shardio.convert(values, tmp_path / "out", workers=0, progress=progress)
    assert [one.name for one in report.broken] == ["2", "3"]
    text = "2 of 4 inputs are broken, and listed in report.broken; the first is '2': "
    assert [text in str(one.message) for one in caught] == [True] * (progress is None)
    assert all(one.filename == __file__ for one in caught)


def test_a_tuple_is_one_sample_whatever_its_values_are(tmp_path: Path) -> None:
    def boxes(i: int) -> tuple[list[list[int]], list[int]]:
        return [[0, i], [9, 9]], [5, 6]

    names = ("boxes", "labels")
    report = shardio.convert([0, 1], tmp_path / "out", samples=boxes, names=names, workers=0)
    assert (report.n_samples, report.broken) == (2, ())
    with shardio.open(tmp_path / "out") as dataset:
        assert [(sample["boxes"], sample["labels"]) for sample in dataset] == [boxes(0), boxes(1)]


def test_an_array_of_dicts_is_several_samples(tmp_path: Path) -> None:
    def make(i: int) -> Any:
        return np.array([{"a": i}, {"a": 2}], dtype=object)

    assert shardio.convert([0, 1], tmp_path / "out", samples=make, workers=0).n_samples == 4


@pytest.mark.parametrize("names", [{"a", "b"}, np.array(["a", "b"]), (n for n in "ab"), 0, "ab"])
def test_names_without_an_order_are_refused(names: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="names must be a sequence of strings; found "):
        shardio.convert([1], tmp_path / "out", samples=lambda n: (n, n), names=names)
    assert not (tmp_path / "out").exists()


def test_progress_counts_items_and_no_bytes(tmp_path: Path) -> None:
    updates: list[Progress] = []
    shardio.convert(range(5), tmp_path / "out", samples=lambda n: {"n": n}, progress=updates.append)
    assert [update.n_inputs_done for update in updates] == list(range(6))
    assert {(update.n_inputs, update.n_bytes, update.n_bytes_done) for update in updates} == {
        (5, 0, 0)
    }
    assert progress_state(updates[-1]).counts == "5 of 5 items"


def test_an_exception_breaks_only_its_item_and_names_the_line(tmp_path: Path) -> None:
    def make(n: int) -> Iterator[dict[str, Any]]:
        yield {"n": n}
        if n == 1:
            raise ValueError("no good")
        if n == 2:
            yield {"n": "text"}
        if n == 3:
            yield {"m": 1}

    report = shardio.convert(range(5), tmp_path / "out", samples=make, workers=0)
    assert column(tmp_path / "out", "n") == [0, 4]
    assert [one.name for one in report.broken] == ["1", "2", "3"]
    reasons = [one.reason for one in report.broken]
    assert re.fullmatch(r"ValueError: no good \(test_python_items.py, line \d+\)", reasons[0])
    assert reasons[1].startswith("sample 1: field 'n'")
    assert reasons[2].startswith("sample 1: fields missing: ['n'], not in the schema: ['m']; ")
    kept = shardio.convert(range(5), tmp_path / "kept", samples=make, workers=0, keep_partial=True)
    assert kept.n_samples == 5
    stopped = shardio.convert(range(5), tmp_path / "stop", samples=make, workers=0, on_error="stop")
    assert stopped.stopped and stopped.n_samples == 1


def test_finished_items_are_not_made_again(tmp_path: Path) -> None:
    out, made = tmp_path / "out", tmp_path / "made"

    def make(n: int) -> dict[str, Any]:
        with made.open("a") as file:
            file.write(f"{n} ")
        if n == 3 and not (tmp_path / "may").exists():
            raise KeyboardInterrupt
        return {"n": n}

    with pytest.raises(KeyboardInterrupt):
        shardio.convert(range(5), out, samples=make, workers=0)
    (tmp_path / "may").touch()
    made.write_text("")
    shardio.convert(range(5), out, samples=make, workers=0, resume=True)
    assert column(out, "n") == [0, 1, 2, 3, 4]
    assert made.read_text().split() == ["0", "3", "4"]  # the first one also gives the schema


def test_items_that_a_dataset_has_are_not_appended_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardio.convert([1, 2], out, samples=numbers, workers=0)
    report = shardio.convert([1, 2, 3], out, samples=numbers, workers=0, append=True)
    assert report.counts == {"duplicate": 2, "converted": 1}
    assert column(out, "n") == [1, 2, 2, 3, 3, 3]
    with pytest.raises(InvalidArgument, match="function was 'numbers', is 'len'"):
        shardio.convert([[4]], out, samples=len, workers=0, append=True)


def test_items_have_distinct_names(tmp_path: Path) -> None:
    class Odd:
        pass

    items = ["a/ü", Path("b"), ("c", 1), {"d": None}, 1.5, "", "a/ü", "x" * 300, Odd(), "\ud800"]
    report = shardio.convert(items, tmp_path / "out", samples=lambda _: {"x": 1}, workers=0)
    names = [one.name for one in report.inputs]
    assert names[:7] == ["a/ü", "b", '["c", 1]', '{"d": null}', "1.5", '""', "a/ü (2)"]
    assert names[7].startswith("x" * 200 + "… ") and names[8].startswith("Odd ")
    assert names[9] == "\\ud800"
    assert report.n_samples == len(items)
    items = ["a", "a", "a (2)", "a"]
    report = shardio.convert(items, tmp_path / "alike", samples=lambda _: {"x": 1}, workers=0)
    assert [one.name for one in report.inputs] == ["a", "a (2)", "a (2) (2)", "a (3)"]


def test_the_schema_is_given_or_that_of_the_first_sample(tmp_path: Path) -> None:
    def make(n: int) -> dict[str, Any] | None:
        if n == 0:
            raise OSError("gone")
        return {"x": np.zeros(n)} if n > 1 else None

    report = shardio.convert(range(4), tmp_path / "a", samples=make, workers=0)
    assert [one.outcome for one in report.inputs] == ["broken", "empty", "converted", "broken"]
    schema = Schema({"x": Array("float64", (None,))})
    shardio.convert(range(4), tmp_path / "b", samples=make, workers=0, schema=schema)
    assert [len(x) for x in column(tmp_path / "b", "x")] == [2, 3]
    with pytest.raises(InvalidArgument, match="none of the first 2 items gives.*OSError: gone"):
        shardio.convert(range(2), tmp_path / "c", samples=make, workers=0)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("src", "options", "message"),
    [
        ([], {"samples": numbers}, "no items to make"),
        ("folder", {"samples": numbers}, "expected an iterable of items"),
        ([1], {"samples": 3}, "samples must be a function"),
        ([1], {"samples": numbers, "frames": 3}, "frames: only for files"),
        ([1], {"samples": numbers, "labels": "x"}, "labels: only for files"),
        (
            [1],
            {"samples": numbers, "workers": -1},
            "workers must be an integer from 0 up; found -1",
        ),
        ([1], {"samples": numbers, "workers": "2"}, "workers must be an integer .*; found '2'"),
        ([1], {"samples": numbers, "shard_bytes": "1"}, "shard_bytes must be an .*; found '1'"),
        ([1], {"samples": numbers, "names": "xy"}, "names must be a sequence of strings"),
        ([(1, 2)], {"names": ("x", "x")}, "names must be unique; found 'x', 'x'"),
        (["a"], {"names": ("x",), "resume": True}, "resume: not for samples"),
        (["a"], {"names": ("x",), "frames": 3}, "frames: not for samples from an iterable"),
        (["a"], {"names": ("x",), "shard_size": 3}, "shard_size: write shard_bytes="),
        (["a"], {"names": ("x",), "features": 3}, r"features: write schema=shardio\.Schema\("),
        (["a"], {"names": ("x",), "num_workers": 3}, "num_workers: did you mean 'workers'"),
        (".", {"kind": "tables", "columns": ["x"]}, r"fields \(--schema\), references \(--refe"),
        (".", {"num_workers": 3}, "not an option of .*; did you mean 'workers'"),
        (["a"], {"names": ("x",), "append": True, "resume": True}, "resume: not for samples"),
        (".", {"names": ("x",)}, "names: only for samples"),
        ([open], {"samples": numbers, "workers": 0}, None),
    ],
)
def test_refused_options(
    tmp_path: Path, src: Any, options: dict[str, Any], message: str | None
) -> None:
    if message is None:
        src, message = [(n for n in range(3))], "cannot be sent to worker processes: .*create it in"
    with pytest.raises(InvalidArgument, match=message):
        shardio.convert(src, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


class Pairs:
    """A map-style data set without `__iter__`, like torch's."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Any, int]:
        if i == 5:
            raise ValueError("bad")
        return np.full(3, i, np.float32), i % 2


def test_a_data_set_is_converted_by_position_in_workers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = shardio.convert(Pairs(8), out, names=("x", "label"), workers=1)
    assert column(out, "label") == [0, 1, 0, 1, 0, 0, 1]
    assert [one.name for one in report.broken] == ["5"]
    assert "ValueError: bad" in report.broken[0].reason
    with shardio.open(out) as dataset:
        assert dataset.schema == Schema({"x": Array("float32", (3,)), "label": Array("int64")})
        assert dataset.converter["options"]["names"] == ["x", "label"]


def test_positions_of_a_large_data_set_are_grouped_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python_samples.index_runs(3) == [0, 1, 2]
    monkeypatch.setattr(python_samples, "MAX_ITEMS", 4)
    assert python_samples.index_runs(4) == [0, 1, 2, 3]
    assert python_samples.index_runs(9) == [(0, 3), (4, 7), (8, 8)]
    for n in range(1, 50):
        found = python_samples.index_runs(n)
        runs = [run if isinstance(run, tuple) else (run, run) for run in found]
        assert len(runs) <= 4
        assert [i for first, last in runs for i in range(first, last + 1)] == list(range(n))


def test_a_tuple_without_names_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"found a tuple of 2; name its parts: names=\("):
        shardio.convert(Pairs(2), tmp_path / "out", workers=0)
    with pytest.raises(
        SchemaError, match="expected 2 names, one for each value of a sample; found x"
    ):
        shardio.convert(Pairs(2), tmp_path / "out", workers=0, names=("x",))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("returned", "names", "rows"),
    [
        ((1, 2.5), ("a", "b"), [(1, 2.5)]),
        ((1, np.array([2, 3])), ("a", "b"), [(1, [2, 3])]),
        (((1, 2), (3, 4)), ("a", "b"), [([1, 2], [3, 4])]),
        ([(1, 2), (3, 4)], ("a", "b"), [(1, 2), (3, 4)]),
        (7, ("a",), [(7,)]),
        ("text", ("a",), [("text",)]),
        (np.arange(3), ("a",), [([0, 1, 2],)]),
        ([7, 8], ("a",), [(7,), (8,)]),
    ],
)
def test_a_function_of_items_may_return_a_tuple_or_one_value(
    tmp_path: Path, returned: Any, names: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> None:
    out = tmp_path / "out"
    shardio.convert([0], out, samples=lambda _: returned, names=names, workers=0)
    with shardio.open(out) as dataset:
        found = [[np.asarray(sample[name]).tolist() for name in names] for sample in dataset]
    assert found == [list(row) for row in rows]


def test_a_tuple_or_value_that_is_not_named_says_how(tmp_path: Path) -> None:
    texts = {"found a tuple of 2; name its parts": (1, 2), "found int; name it": 3}
    for text, value in texts.items():
        with pytest.raises(SchemaError, match=text):
            shardio.convert([value], tmp_path / "out", samples=lambda item: item, workers=0)
    with pytest.raises(SchemaError, match="expected 2 names, one for each value of a sample"):
        shardio.convert([0], tmp_path / "out", samples=lambda _: (1, 2), names=["a"], workers=0)


def test_names_of_dicts_are_an_error(tmp_path: Path) -> None:
    text = "this one is a dict of n.*: leave names out$"
    with pytest.raises(SchemaError, match=f"sample 0: names= is for samples that are.*{text}"):
        shardio.convert([{"n": 1}], tmp_path / "out", names=["m"])
    with pytest.raises(SchemaError, match=text):
        shardio.convert([1], tmp_path / "out", samples=numbers, names=["m"], workers=0)
    with pytest.raises(InvalidArgument, match="names must be a sequence of strings; found 3"):
        shardio.convert([(1,)], tmp_path / "out", names=3)  # type: ignore[call-overload]
    assert not (tmp_path / "out").exists()
    shardio.convert([{"n": 1}], tmp_path / "out", names=["n"])  # the same names
    assert column(tmp_path / "out", "n") == [1]


def test_named_tuples_have_names_and_a_single_name_is_for_the_value(tmp_path: Path) -> None:
    Point = collections.namedtuple("Point", "x y")
    shardio.convert(iter([Point(1, 2.5), Point(3, 4.5)]), tmp_path / "a")
    assert column(tmp_path / "a", "y") == [2.5, 4.5]
    shardio.convert(iter([1, 2]), tmp_path / "b", names=["n"])
    assert column(tmp_path / "b", "n") == [1, 2]


def test_pillow_images_keep_their_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    picture = PIL.fromarray(pixels)
    picture.getexif()[274] = 6  # turned: a viewer would turn it back
    grey = PIL.fromarray(pixels[..., 0])
    shardio.convert([{"image": picture}, {"image": grey}], tmp_path / "a")
    with shardio.open(tmp_path / "a") as dataset:
        assert dataset.schema == Schema({"image": Image()})
        assert np.array_equal(decode_image(dataset[0]["image"]), pixels)
        assert np.array_equal(decode_image(dataset[1]["image"])[..., 1], pixels[..., 0])
    schema = Schema({"image": Array("uint8", (None, None, 3))})
    shardio.convert([{"image": picture}], tmp_path / "b", schema=schema)
    assert np.array_equal(column(tmp_path / "b", "image")[0], pixels)
    with pytest.raises(SchemaError, match=r'mode CMYK; .*picture\.convert\("RGB"\)'):
        shardio.convert([{"image": picture.convert("CMYK")}], tmp_path / "c")


def test_objects_with_an_array_protocol_become_arrays(tmp_path: Path) -> None:
    class Lazy:  # as a tensor of tinygrad
        def numpy(self) -> Any:
            return np.arange(3, dtype=np.int16)

    class Shown:  # as an array of JAX
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array([1, 2], "f4")

    shardio.convert([{"a": Lazy(), "b": Shown(), "t": "x"}], tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        fields = {"a": Array("int16", (3,)), "b": Array("float32", (2,)), "t": Text()}
        assert dataset.schema == Schema(fields)
        assert dataset[0]["a"].tolist() == [0, 1, 2]


class Unready:
    """A value that claims to be an array and raises, like a sparse or meta tensor of torch."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise self.error


class OddTensor(Unready):
    """A stand-in for a torch tensor, for machines without torch."""

    __module__ = "torch"
    dtype = "torch.float8_e4m3fn"

    def numpy(self, *, force: bool = False) -> Any:
        raise self.error


OddTensor.__name__ = "Tensor"


def circle() -> list[Any]:
    found: list[Any] = [1, "a"]
    found.append(found)
    return found


UNREADY = {
    "picture": (PIL.new("RGB", (0, 0)), PIL.new("RGB", (2, 2)), "cannot write empty image"),
    "tensor": (OddTensor(TypeError("unsupported ScalarType")), np.ones(2), "unsupported Scalar"),
    "meta": (OddTensor(NotImplementedError("no data")), np.ones(2), "NotImplementedError: no data"),
    "array": (Unready(KeyError("lost")), np.ones(2), "a .*Unready cannot be .* KeyError: 'lost'"),
    "inner": ({"a": [Unready(OSError(5, "gone"))]}, {"a": [1.5]}, r"OSError: \[Errno 5\] gone"),
    "circle": (circle(), [1, "a"], "RecursionError"),
}


@pytest.mark.parametrize("kind", UNREADY)
@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("bad", [0, 2])
def test_an_odd_value_breaks_its_item(tmp_path: Path, kind: str, n_workers: int, bad: int) -> None:
    values = [UNREADY[kind][n != bad] for n in range(4)]
    source: Any = [{"x": value, "n": n} for n, value in enumerate(values)]
    items, whole = tmp_path / "items", tmp_path / "set"
    report = shardio.convert(range(4), items, samples=source.__getitem__, workers=n_workers)
    by_position = shardio.convert(source, whole, workers=n_workers)
    for each, out in ((report, items), (by_position, whole)):
        assert [one.name for one in each.broken] == [str(bad)]
        expected = rf"sample 0: field 'x': .*{UNREADY[kind][2]}"
        assert re.search(expected, each.broken[0].reason, re.DOTALL), each.broken[0].reason
        assert column(out, "n") == [n for n in range(4) if n != bad]


def test_a_sample_that_raises_when_read_breaks_only_its_item(tmp_path: Path) -> None:
    class Lost(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no connection")

    source = [Lost(x=1), {"x": 2}, Lost(x=3)]
    schema = Schema({"x": Array("int64")})
    for name, given in (("inferred", None), ("given", schema)):
        report = shardio.convert(
            range(3), tmp_path / name, samples=source.__getitem__, workers=0, schema=given
        )
        assert [one.name for one in report.broken] == ["0", "2"]
        assert "RuntimeError: no connection" in report.broken[1].reason
        assert column(tmp_path / name, "x") == [2]


def test_if_no_value_can_be_stored_the_first_error_is_raised(tmp_path: Path) -> None:
    calls = []

    def make(n: int) -> dict[str, Any]:
        calls.append(n)
        return {"x": Unready(KeyError("lost"))}

    with pytest.raises(SchemaError, match=r"field 'x': .*Unready .*KeyError: 'lost'") as caught:
        shardio.convert(range(100), tmp_path / "out", samples=make, workers=0)
    assert caught.value.__notes__ == ["while making samples of 0"] and len(calls) == 64
    assert not (tmp_path / "out").exists()


def test_an_error_names_the_sample_and_field_of_an_iterable(tmp_path: Path) -> None:
    for n in (0, 2):
        samples = [{"x": Unready(KeyError("lost")) if k == n else np.ones(2)} for k in range(3)]
        expected = f"sample {n}: field 'x': .*KeyError: 'lost'"
        with pytest.raises(SchemaError, match=expected):
            shardio.convert(iter(samples), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        shardio.convert([{"x": np.ones(2)}], tmp_path / f"base{n}")
        with pytest.raises(SchemaError, match=expected):
            shardio.convert(iter(samples), tmp_path / f"base{n}", append=True)
        with shardio.open(tmp_path / f"base{n}") as dataset:
            assert dataset.generation == 1


def test_a_function_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:

        def make(n: int) -> dict[str, Any]:
            file.write(str(n))
            return {"n": n}

        with pytest.raises(InvalidArgument, match="cannot be sent to worker processes"):
            shardio.convert([1], tmp_path / "out", samples=make, workers=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.external
def test_torch_tensors_become_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is too large for the extra dev")

    class Clips(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            half = torch.full((2,), i + 0.5, dtype=torch.bfloat16)
            return {"x": torch.ones(2, requires_grad=True) * i, "half": half, "y": i}

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Iterator[Any]:
            return (Clips()[i] for i in range(3))

        def __len__(self) -> int:
            return 3

    shardio.convert(Clips(), tmp_path / "a", workers=1)
    shardio.convert(Stream(), tmp_path / "b")
    for out in (tmp_path / "a", tmp_path / "b"):
        with shardio.open(out) as dataset:
            assert dataset.schema["half"] == Array("bfloat16", (2,))
            bits = torch.from_numpy(np.array(dataset[2]["half"])).view(torch.bfloat16)
            assert bits.tolist() == [2.5, 2.5] and dataset[2]["x"].tolist() == [2.0, 2.0]


def test_workers_that_crash_before_the_first_item_are_an_error(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os._exit, (3,)

    def make(_: object, bomb: object = Bomb()) -> dict[str, Any]:
        return {"n": 1}

    with pytest.raises(UnsupportedEnvironment, match="crash before they do anything: .* code 3"):
        shardio.convert([1], tmp_path / "out", samples=make, workers=1)


class Labelled:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": np.float32(k), "label": k}


@pytest.mark.parametrize("kind", ["function", "dataset"])
def test_classes_name_the_labels_of_items(kind: str, tmp_path: Path) -> None:
    source: Any = range(3) if kind == "function" else Labelled()
    make: Any = Labelled().__getitem__ if kind == "function" else None
    options: dict[str, Any] = {"samples": make, "workers": 0}
    out, names = tmp_path / "out", ["cat", "dog", "fox"]
    assert shardio.convert(source, out, classes=names, **options).classes == tuple(names)
    report = shardio.convert(source, out, classes=names, append=True, **options)
    assert report.counts == {"duplicate": 3}
    assert shardio.convert(source, out, classes=names, resume=True, **options).n_samples == 0
    with pytest.raises(InvalidArgument, match="classes"):
        shardio.convert(source, out, classes=names[::-1], append=True, **options)
    with pytest.warns(RuntimeWarning, match="1 of 3 inputs are broken"):
        report = shardio.convert(source, tmp_path / "fewer", classes=names[:2], **options)
    said = "sample 0: label 2 has no name; classes has 2 names, for the labels from 0"
    assert ([one.reason for one in report.broken], report.n_samples) == ([said], 2)


def test_an_append_of_items_accepts_only_labels_with_names(tmp_path: Path) -> None:
    make: Any = Labelled().__getitem__
    shardio.convert([0, 1], tmp_path / "out", samples=make, workers=0, classes=["cat", "dog"])
    with pytest.warns(RuntimeWarning, match="label 2 has no name"):
        shardio.convert([2, 1], tmp_path / "out", samples=make, workers=0, append=True)
    assert column(tmp_path / "out", "label") == [0, 1]


def test_classes_given_for_an_append_of_items_are_checked(tmp_path: Path) -> None:
    out, names = tmp_path / "out", ["cat", "dog"]
    shardio.convert(iter([{"label": 1, "x": np.float32(1)}]), out, classes=names)
    options: dict[str, Any] = {"samples": Labelled().__getitem__, "workers": 0, "append": True}
    with pytest.warns(RuntimeWarning, match="label 2 has no name"):
        shardio.convert([2, 0], out, classes=names, **options)
    assert column(out, "label") == [1, 0]


@pytest.mark.parametrize("sample", [{"label": "pos"}, {"label": 0.5}, {"other": 1}])
def test_classes_of_items_need_a_field_label_of_integers(sample: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="names of the integers in the field 'label'"):
        shardio.convert(
            [0], tmp_path / "out", samples=lambda _: sample, workers=0, classes=["neg", "pos"]
        )
    assert not (tmp_path / "out").exists()
