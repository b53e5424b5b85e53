from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

from shardio import Array, List, Schema, ShardLoader, Text
from shardio import open as open_dataset
from shardio.errors import InvalidArgument, SchemaError, UnsupportedEnvironment
from shardio.format.types import DTYPES
from tests.loading import write_dataset

torch = pytest.importorskip("torch", reason="needs torch, which the extra dev does without")

from shardio.outputs.torch import TorchAdapter  # noqa: E402

pytestmark = [pytest.mark.external, pytest.mark.process]

N_SAMPLES = 10
SCHEMA = Schema(
    {"x": Array("float32", (5, 3)), "label": Array("int64"), "run": Array("int16", (None,))}
    | {f"as_{name}": Array(name, (2,)) for name in DTYPES}
    | {"note": Text()}
)


def _sample(i: int) -> dict[str, Any]:
    numbers = {f"as_{name}": np.full(2, i, "u2" if name == "bfloat16" else name) for name in DTYPES}
    x, run = np.full((5, 3), i, np.float32), np.full(i % 3, i, np.int16)
    return {"x": x, "label": i, "run": run, **numbers, "note": f"note {i}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [_sample(i) for i in range(N_SAMPLES)]
    return write_dataset(tmp_path_factory.mktemp("torch") / "set", N_SAMPLES, 2, SCHEMA, samples)


def _loader(folder: Any, **options: Any) -> ShardLoader:
    return ShardLoader(folder, 4, **{"num_workers": 0, "output": "torch", **options})


def test_a_field_takes_a_dtype_of_torch() -> None:
    for name in DTYPES.keys() - {"uint16", "uint32", "uint64"}:
        assert Array(getattr(torch, name)) == Array(name)
    with pytest.raises(SchemaError, match=r"unknown dtype torch\.complex64"):
        Array(torch.complex64)


def test_batches_are_tensors_of_the_dtypes_of_the_fields_also_in_lists(folder: str) -> None:
    with _loader(folder) as loader:
        for batch in loader:
            assert batch["x"].shape == (batch.n_rows, 5, 3)
            assert batch["x"][:, 0, 0].tolist() == batch.indices.tolist()
            assert batch["note"] == [f"note {i}" for i in batch.indices]
            assert [type(run) for run in batch["run"]] == [torch.Tensor] * batch.n_rows
            assert [run.tolist() for run in batch["run"]] == [[i] * (i % 3) for i in batch.indices]
            for name in DTYPES:
                assert batch[f"as_{name}"].dtype == getattr(torch, name)
            bits = batch["as_bfloat16"].view(torch.int16)[:, 0]
            assert bits.tolist() == batch.indices.tolist()


def test_a_tensor_on_the_cpu_is_the_memory_of_its_batch(folder: str) -> None:
    with _loader(folder, fields=["x", "as_bfloat16"]) as loader:
        batch = next(iter(loader))
        base, end = batch._block.ctypes.data, batch._block.nbytes
        assert all(0 <= batch[name].data_ptr() - base < end for name in batch)


def test_what_is_left_of_a_tensor_keeps_its_values_while_later_batches_arrive(folder: str) -> None:
    with _loader(folder, num_workers=1, prefetch=0, fields=["label"]) as loader:
        views = [batch["label"][1:] for _ in range(3) for batch in loader]
    for k, view in enumerate(views):
        first = k % 3 * 4
        assert view.tolist() == list(range(first + 1, min(first + 4, N_SAMPLES)))


def test_a_tensor_may_be_written_to_and_changes_no_other_batch(folder: str) -> None:
    with _loader(folder, fields=["label"]) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch["label"].tolist() == batch.indices.tolist()
                batch["label"].add_(100)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reused_blocks_keep_their_tensors(folder: str, num_workers: int) -> None:
    with _loader(folder, fields=["label"], reuse=True, num_workers=num_workers) as loader:
        seen = set()
        for _ in range(4):
            for batch in loader:
                assert batch["label"].tolist() == batch.indices.tolist()
                seen.add(id(batch["label"]))
    assert len(seen) < 12


@pytest.mark.parametrize(("rule", "beside"), [("pad", "run_mask"), ("ragged", "run_offsets")])
def test_joined_and_companion_arrays_are_tensors(folder: str, rule: str, beside: str) -> None:
    options = {"fields": ["run"], "collate": {"run": rule}}
    with _loader(folder, **options) as loader, _loader(folder, **options, output="numpy") as other:
        for batch, arrays in zip(loader, other, strict=True):
            for name in ("run", beside):
                assert isinstance(batch[name], torch.Tensor)
                np.testing.assert_array_equal(batch[name].numpy(), arrays[name])


def test_a_tensor_keeps_the_owner_of_its_array_until_its_last_view_is_gone() -> None:
    memory = np.ndarray((64,), np.uint8, bytearray(64))
    is_gone = weakref.ref(memory)
    view = TorchAdapter().wrap(np.ndarray((8,), np.int64, memory, 0), memory)[2:].numpy()[1:]
    del memory
    gc.collect()
    assert is_gone() is not None
    del view
    assert is_gone() is None


def test_a_tensor_for_many_arrays_takes_the_values_of_each() -> None:
    arrays = [np.full((2, 3), i, np.uint16) for i in range(3)]
    put = TorchAdapter().make_copier(arrays[0], "bfloat16")
    tensors = [put(array) for array in arrays]
    assert tensors[0] is tensors[2] and tensors[0].dtype == torch.bfloat16
    assert tensors[0].view(torch.int16).tolist() == [[2] * 3] * 2
    assert arrays[0][0, 0] == 0, "it has memory of its own"


def test_a_device_that_is_not_the_cpu_gets_tensors_of_its_own() -> None:
    maker = TorchAdapter("meta")  # has shapes and no values, and is everywhere
    assert not maker.aliases
    assert maker.wrap(np.zeros((2, 3)), None).device.type == "meta"


@pytest.mark.parametrize("shape", [(), (0, 3), (4,)])
def test_arrays_of_any_shape_and_byte_order_become_tensors(shape: tuple[int, ...]) -> None:
    tensor = TorchAdapter().wrap(np.ones(shape, ">f4"), None)
    assert tensor.shape == shape and tensor.dtype == torch.float32
    assert bool((tensor == 1).all())


def test_a_device_that_torch_does_not_know_or_cannot_open_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="torch has no device 'gpu3'"):
        TorchAdapter("gpu3")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedEnvironment, match=r"cannot open device cuda .*device='cpu'"):
            TorchAdapter("cuda")


def test_a_device_may_be_an_object_of_torch(folder: str) -> None:
    device = torch.device("cpu")
    with _loader(folder, device=device) as loader:
        assert next(iter(loader))["label"].device == device
    with pytest.raises(
        InvalidArgument, match=r"type='cpu'\), for .* write output=\"torch\"; found"
    ):
        _loader(folder, output="tinygrad", device=device)


def test_who_transforms_with_torch_is_warned_of_tensors_of_tinygrad(folder: str) -> None:
    same = torch.nn.Identity()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _loader(folder, output=None, transform=same).close()
        _loader(folder, output="tinygrad", transform=same).close()
    (one,) = caught
    assert 'write output="torch"' in str(one.message)
    assert (one.category, one.filename) == (RuntimeWarning, __file__)


def _labels(samples: list[dict[str, Any]]) -> Any:
    return torch.tensor([sample["label"] for sample in samples])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dataset_is_one_for_the_workers_of_torchs_loader(folder: str, method: str) -> None:
    with open_dataset(folder) as dataset:
        assert dataset[3]["label"] == 3
        loader = torch.utils.data.DataLoader(
            dataset, 4, num_workers=1, collate_fn=_labels, multiprocessing_context=method
        )
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


NESTED = Schema(
    {
        "image": Array("uint8", (4, 6, 3)),
        "varying": Array("uint8", (None, None, 3)),
        "parts": List(Array("int32", (None,))),
        "halves": Array("bfloat16", (None,)),
        "maybe": Array("float32", (None,), optional=True),
        "note": Text(),
    }
)


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [
        {
            "image": np.full((4, 6, 3), i, np.uint8),
            "varying": np.full((4 + i, 6, 3), i, np.uint8),
            "parts": [np.full(i, i, np.int32)] * 2,
            "halves": np.full(i, 0x3F80, np.uint16),  # 1.0
            "maybe": None if i == 1 else np.full(2, i, np.float32),
            "note": f"note {i}",
        }
        for i in range(4)
    ]
    return write_dataset(tmp_path_factory.mktemp("nested") / "set", 4, 1, NESTED, samples)


def test_arrays_in_lists_are_tensors_over_the_memory_of_the_batch(nested: str) -> None:
    with _loader(nested) as loader:
        batch = next(iter(loader))
    _, block, _ = batch.filled_block
    begin, end = block.ctypes.data, block.ctypes.data + block.nbytes
    assert [begin <= each.data_ptr() < end for each in batch["varying"]] == [True] * 4
    assert [each.tolist() for each in batch["parts"][3]] == [[3, 3, 3]] * 2
    assert batch["halves"][2].tolist() == [1.0, 1.0]
    assert batch["halves"][2].dtype == torch.bfloat16
    assert batch["maybe"][1] is None and batch["maybe"][2].tolist() == [2.0, 2.0]
    assert batch["note"][3] == "note 3"


def test_tensors_in_lists_stay_valid_while_later_batches_arrive(nested: str) -> None:
    with ShardLoader(nested, 1, output="torch", num_workers=1) as loader:
        held = [batch["varying"][0] for batch in loader]
    assert [set(each.flatten().tolist()) for each in held] == [{0}, {1}, {2}, {3}]


def test_pictures_with_the_channels_first_are_channels_last_in_memory(nested: str) -> None:
    with _loader(nested, layout="CHW") as loader:
        batch = next(iter(loader))
    image = batch["image"]
    assert image.shape == (4, 3, 4, 6)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert [tuple(each.shape) for each in batch["varying"]] == [(3, 4 + i, 6) for i in range(4)]


def test_to_moves_tensors_also_in_lists_and_leaves_the_rest(nested: str) -> None:
    with _loader(nested) as loader:
        batch = next(iter(loader))
    moved = batch.to("meta", non_blocking=True)
    assert moved["image"].device.type == "meta"
    assert {each.device.type for each in moved["varying"]} == {"meta"}
    assert {each.device.type for parts in moved["parts"] for each in parts} == {"meta"}
    assert moved["maybe"][1] is None and moved["maybe"][0].device.type == "meta"
    assert moved["note"] == batch["note"]
    assert moved.indices.tolist() == batch.indices.tolist() and moved.n_rows == 4
    assert batch["image"].device.type == "cpu" and batch["varying"][0].device.type == "cpu"
    assert batch.to(torch.device("cpu"))["image"] is batch["image"]


def test_only_tensors_of_torch_can_be_moved(nested: str) -> None:
    for fields in (["image"], ["varying"]):
        with _loader(nested, fields=fields, output="numpy") as loader:
            with pytest.raises(TypeError, match='has a ndarray: pass output="torch"'):
                next(iter(loader)).to("cpu")


@pytest.mark.parametrize("wrong", ["dtype", "tensor", "none"])
def test_to_takes_a_device_and_nothing_that_would_convert_labels(nested: str, wrong: str) -> None:
    found: Any = {"dtype": torch.float16, "tensor": torch.ones(1), "none": None}[wrong]
    with ShardLoader(nested, 2, output="torch", num_workers=0) as loader:
        batch = next(iter(loader))
    with pytest.raises(TypeError, match=r"batch\.to takes a device, .*batch\[name\]\.to\(dtype\)"):
        batch.to(found)


def test_a_batch_is_pickled_with_its_lists_of_tensors(nested: str) -> None:
    with _loader(nested) as loader:
        batch = pickle.loads(pickle.dumps(next(iter(loader))))
    assert batch["varying"][2].tolist() == torch.full((6, 6, 3), 2).tolist()


def test_a_dataloader_around_a_loader_gets_a_hint(folder: str) -> None:
    with _loader(folder) as loader:
        for size in (2, None):
            data_loader = torch.utils.data.DataLoader(loader, batch_size=size)
            with pytest.raises(TypeError, match=r"without a DataLoader .*MapView\(dataset\)"):
                next(iter(data_loader))


def test_datasets_of_torch_get_a_hint(folder: str) -> None:
    with open_dataset(folder) as dataset:
        part = torch.utils.data.Subset(dataset, [1, 2])
        with pytest.raises(InvalidArgument, match=r"write dataset\.select\(indices\)"):
            _loader(part)
        with pytest.raises(InvalidArgument, match=r"shardio\.convert\(samples, path\)"):
            _loader(torch.utils.data.ConcatDataset([part]))
