from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from shardio import Array, Schema, ShardLoader, Text
from shardio.errors import InvalidArgument
from tests.loading import write_dataset

jax = pytest.importorskip("jax", reason="needs JAX, which the extra dev does without")

from shardio.outputs.jax import JaxAdapter  # noqa: E402

pytestmark = [pytest.mark.external, pytest.mark.process]

N_SAMPLES = 10
SCHEMA = Schema(
    {"x": Array("float32", (16,)), "bits": Array("bfloat16"), "run": Array("int16", (None,))}
    | {"note": Text()}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [
        {
            "x": np.full(16, i, "f4"),
            "bits": np.uint16(i),
            "run": np.full(i % 3, i, "i2"),
            "note": f"note {i}",
        }
        for i in range(N_SAMPLES)
    ]
    return write_dataset(tmp_path_factory.mktemp("jax") / "set", N_SAMPLES, 2, SCHEMA, samples)


def _loader(folder: str, **options: Any) -> ShardLoader:
    given = {"num_workers": 0, "output": "jax", "device": "cpu", **options}
    return ShardLoader(folder, 4, **given)


def test_the_repr_of_a_batch_names_arrays(folder: str) -> None:
    with _loader(folder) as loader:
        assert "run 4 arrays of int16 (0–2,)" in repr(next(iter(loader)))


@pytest.mark.parametrize("options", [{}, {"reuse": True}], ids=["leased", "reuse"])
def test_held_arrays_of_lists_keep_values(folder: str, options: dict[str, Any]) -> None:
    with _loader(folder, prefetch=0, **options) as loader:
        held = [
            (i, run) for batch in loader for i, run in zip(batch.indices, batch["run"], strict=True)
        ]
    for i, run in held:
        assert isinstance(run, jax.Array) and run.tolist() == [i] * (i % 3)


@pytest.mark.parametrize("options", [{}, {"reuse": True}], ids=["leased", "reuse"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_held_arrays_keep_values(folder: str, num_workers: int, options: dict[str, Any]) -> None:
    with _loader(folder, num_workers=num_workers, prefetch=0, **options) as loader:
        held = [
            (batch.indices.tolist(), batch["x"], batch["bits"])
            for _ in range(3)
            for batch in loader
        ]
    for indices, x, bits in held:
        assert isinstance(x, jax.Array) and bits.dtype == jax.numpy.bfloat16
        assert x[:, 3].tolist() == indices
        assert np.asarray(bits).view(np.uint16).tolist() == indices


@pytest.mark.parametrize("options", [{}, {"reuse": True}], ids=["leased", "reuse"])
def test_an_array_on_the_cpu_is_the_memory_of_its_batch(
    folder: str, options: dict[str, Any]
) -> None:
    with _loader(folder, fields=["x"], **options) as loader:
        batch = next(iter(loader))
        base, end = batch._block.ctypes.data, batch._block.nbytes
        assert 0 <= batch["x"].unsafe_buffer_pointer() - base < end


@pytest.mark.parametrize(("rule", "beside"), [("pad", "run_mask"), ("ragged", "run_offsets")])
def test_joined_and_companion_arrays_are_jax(folder: str, rule: str, beside: str) -> None:
    options = {"fields": ["run", "note"], "collate": {"run": rule}}
    numpy = {**options, "output": "numpy", "device": None}
    with _loader(folder, **options) as loader, _loader(folder, **numpy) as other:
        for batch, arrays in zip(loader, other, strict=True):
            assert batch["note"] == arrays["note"]
            for name in ("run", beside):
                assert isinstance(batch[name], jax.Array)
                np.testing.assert_array_equal(np.asarray(batch[name]), arrays[name])


def test_memory_at_multiples_of_64_bytes_is_taken_as_it_is_and_kept() -> None:
    memory = np.ndarray((4096,), np.uint8, bytearray(4096))
    start = -memory.ctypes.data % 64
    is_gone, array = weakref.ref(memory), np.ndarray((8,), np.float32, memory, start)
    found = JaxAdapter("cpu").wrap(array, memory)
    assert found.unsafe_buffer_pointer() == array.ctypes.data
    view = np.asarray(found)[1:]
    del memory, array, found
    gc.collect()
    assert is_gone() is not None
    del view
    gc.collect()
    assert is_gone() is None


def test_a_step_that_is_given_its_input_away_does_not_write_to_it() -> None:
    memory = np.zeros(4096, np.uint8)
    array = np.ndarray((8,), np.float32, memory, -memory.ctypes.data % 64)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert step(JaxAdapter("cpu").wrap(array, memory)).tolist() == [1.0] * 8
    assert array.tolist() == [0.0] * 8


@pytest.mark.parametrize("name", ["nothing", "cpu:99", "cpu:-1", "cpu:x"])
def test_a_device_that_jax_does_not_have_is_an_error(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"JAX has no device '{name}' here .*; found "):
        JaxAdapter(name)
