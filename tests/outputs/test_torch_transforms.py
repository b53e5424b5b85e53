"""Transforms that are given tensors: modules of torch, torchvision's v2, and OnTensors."""

from __future__ import annotations

import functools
import itertools
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, InvalidArgument, List, Schema, ShardLoader, Text
from shardio._workers.processes.worker_pool import WorkerPool
from shardio.errors import TransformError
from shardio.map_view import MapView
from shardio.transforms import Compose, HorizontalFlip, OnTensors
from tests.loading import write_dataset

torch = pytest.importorskip("torch", reason="needs torch, which the extra dev does without")

pytestmark = [
    pytest.mark.external,
    pytest.mark.usefixtures("warm_zygote", "quick_disk"),  # torch is imported there once
]

N, BATCH = 10, 4
SCHEMA = Schema(
    {
        "label": Array("int64"),
        "image": Array("uint8", (8, 10, 3)),
        "boxes": Array("float32", (None, 4)),
        "parts": List(Array("int32", (None,))),
        "name": Text(),
    }
)


def _image(i: int) -> Any:
    return np.random.default_rng(i).integers(0, 256, (8, 10, 3), np.uint8)


def _sample(i: int) -> dict[str, Any]:
    boxes = np.tile(np.array([1, 2, 5, 6], np.float32), (i % 3, 1))
    parts = [np.full(i, i, np.int32)]
    return {"label": i, "image": _image(i), "boxes": boxes, "parts": parts, "name": f"n{i}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("transforms") / "set"
    return write_dataset(path, N, 2, SCHEMA, map(_sample, range(N)))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> str:
    schema = Schema({"clip": Array("uint8", (5, 8, 10, 3))})
    samples = [{"clip": np.stack([_image(i)] * 5)} for i in range(N)]
    return write_dataset(tmp_path_factory.mktemp("clips") / "set", N, 1, schema, samples)


def loader(folder: str, **options: Any) -> ShardLoader:
    return ShardLoader(folder, BATCH, **{"num_workers": 0, "output": "torch", **options})


def epoch(folder: str, name: str = "image", **options: Any) -> Any:
    with loader(folder, **options) as made:
        return torch.cat([batch[name] for batch in made])


class Record(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A module that keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.given.append(sample)
        return sample


def test_a_module_is_given_tensors_and_what_is_no_array_as_it_is(folder: str) -> None:
    record = Record()
    with loader(folder, transform=record) as made:
        next(iter(made))
    given = record.given[-1]
    assert list(given) == list(SCHEMA) and type(given) is dict
    image = given["image"]
    assert isinstance(image, torch.Tensor) and image.shape == (3, 8, 10)
    assert np.array_equal(image.numpy(), _image(3).transpose(2, 0, 1))
    assert isinstance(given["boxes"], torch.Tensor) and given["boxes"].shape == (0, 4)
    assert given["parts"][0].tolist() == [3, 3, 3]
    assert given["label"] == 3 and not isinstance(given["label"], torch.Tensor)
    assert given["name"] == "n3"


def test_a_plain_function_is_given_arrays_unless_it_is_wrapped(folder: str) -> None:
    def kinds(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"shape": np.array(sample["image"].shape), "kind": type(sample["boxes"]).__name__}

    with loader(folder, transform=kinds) as made:
        batch = next(iter(made))
    assert batch["shape"][0].tolist() == [8, 10, 3] and batch["kind"][0] == "ndarray"
    with loader(folder, transform=OnTensors(kinds)) as made:
        batch = next(iter(made))
    assert batch["shape"][0].tolist() == [3, 8, 10] and batch["kind"][0] == "Tensor"


def _halved(sample: Mapping[str, Any]) -> dict[str, Any]:
    image = sample["image"]
    assert isinstance(image, torch.Tensor)
    return {"image": image[:, ::2].float(), "label": sample["label"]}


def test_results_arrive_as_they_are_returned_unless_hwc_is_asked_for(folder: str) -> None:
    expected = np.stack([_image(i)[::2] for i in range(N)]).astype(np.float32)
    for layout in (None, "CHW"):
        found = epoch(folder, transform=OnTensors(_halved), layout=layout)
        assert np.array_equal(found, expected.transpose(0, 3, 1, 2))
    found = epoch(folder, transform=OnTensors(_halved), layout="HWC")
    assert np.array_equal(found, expected)


def _drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    draws = [torch.rand(()).item(), rng.random(), *torch.randint(99, (2,)).tolist()]
    return {"image": sample["image"], "draws": torch.tensor(draws)}


@pytest.mark.parametrize("start_method", ["zygote", "spawn", "thread"])
def test_draws_do_not_depend_on_the_workers_and_differ_by_epoch(
    folder: str, start_method: str
) -> None:
    def draws(**options: Any) -> list[Any]:
        with loader(folder, transform=OnTensors(_drawn), shuffle=True, **options) as made:
            return [torch.cat([batch["draws"] for batch in made]).tolist() for _ in range(2)]

    expected = draws(seed=1)
    assert draws(seed=1, num_workers=2, start_method=start_method) == expected
    rows = [tuple(row) for row in itertools.chain(*expected, *draws(seed=2))]
    assert len(set(rows)) == 4 * N


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"start_method": "thread"}])
def test_functions_run_in_one_thread_as_in_workers(folder: str, options: dict[str, Any]) -> None:
    def counted(sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": torch.get_num_threads()}

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        given = {"num_workers": 1, **options}
        assert epoch(folder, "n", transform=OnTensors(counted), **given).tolist() == [1] * N
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_stored_arrays_are_copied_so_that_a_function_may_write(folder: str) -> None:
    def brighter(sample: dict[str, Any]) -> dict[str, Any]:
        sample["image"].add_(1)
        sample["boxes"].mul_(2)
        return {"image": sample["image"]}

    for workers in (0, 1):
        found = epoch(folder, transform=OnTensors(brighter), layout="HWC", num_workers=workers)
        assert np.array_equal(found, np.stack([_image(i) + np.uint8(1) for i in range(N)]))
    assert np.array_equal(epoch(folder), np.stack([_image(i) for i in range(N)]))


def test_decoded_pictures_are_given_without_a_copy(tmp_path_factory: Any) -> None:
    pytest.importorskip("simplejpeg", reason="pictures are decoded")
    import shardio
    from shardio.media import encode_jpeg, image

    out = tmp_path_factory.mktemp("decoded") / "set"
    with shardio.DatasetWriter(out, Schema({"image": shardio.Image()})) as writer:
        writer.append({"image": encode_jpeg(_image(0))})
    addresses, decode = [], image.decode_image

    def noted(*arguments: Any, **options: Any) -> Any:
        pixels = decode(*arguments, **options)
        addresses.append(pixels.ctypes.data)
        return pixels

    record = Record()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.samples.decoding.decode_image", noted)
        with loader(str(out), transform=record) as made:
            next(iter(made))
    assert [each["image"].data_ptr() for each in record.given] == addresses != []


def test_torch_is_imported_before_workers_are_forked(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardio._engine.dispatch import backends

    preloaded: list[str] = []

    def noted(*arguments: Any, preload: tuple[str, ...], **options: Any) -> Any:
        preloaded.extend(preload)
        return WorkerPool(*arguments, preload=preload, **options)

    monkeypatch.setattr(backends, "WorkerPool", noted)
    for transform in (None, lambda sample: sample):
        with loader(folder, transform=transform, num_workers=1):
            pass
    assert "torch" not in preloaded
    with loader(folder, transform=OnTensors(_halved), num_workers=1):
        assert "torch" in preloaded


def test_errors_name_the_sample_and_what_to_write(folder: str) -> None:
    def on_meta(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": sample["image"].to("meta")}

    with pytest.raises(TransformError, match=r"(?s)tensor on the CPU.*x\.cpu\(\).*sample 0 of"):
        epoch(folder, transform=OnTensors(on_meta))
    with pytest.raises(InvalidArgument, match=r"the class Record; pass an instance, Record\("):
        loader(folder, transform=Record)
    with pytest.raises(InvalidArgument, match="OnTensors takes a function of a sample; found 3"):
        OnTensors(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="OnTensors must take"):
        OnTensors(lambda a, b, c: {})


def test_a_dict_of_tensors_is_refused_and_its_items_are_fields(folder: str) -> None:
    def nested(sample: dict[str, Any]) -> dict[str, Any]:
        return {"target": {"boxes": sample["boxes"]}}

    with pytest.raises(TransformError, match=r"'target'.* no Tensor: return .* target\.boxes; bat"):
        epoch(folder, transform=OnTensors(nested))

    def flat(sample: dict[str, Any]) -> dict[str, Any]:
        return {"target.boxes": sample["boxes"], "target.label": sample["label"]}

    with loader(folder, transform=OnTensors(flat), collate="list") as made:
        target = next(iter(made))["target"]
    assert [len(boxes) for boxes in target["boxes"]] == [0, 1, 2, 0]
    assert target["label"].tolist() == [0, 1, 2, 3]


def test_bfloat16_arrives_as_bfloat16(folder: str) -> None:
    def halves(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": sample["image"].to(torch.bfloat16)}

    found = epoch(folder, transform=OnTensors(halves))
    assert found.dtype == torch.bfloat16
    assert np.array_equal(found.int().permute(0, 2, 3, 1), np.stack([_image(i) for i in range(N)]))


STORED_AS_BFLOAT16 = Schema(
    {
        "x": Array("bfloat16", (3,)),
        "n": Array("bfloat16"),
        "run": Array("bfloat16", (None,)),
        "parts": List(Array("bfloat16", (2,))),
    }
)


@pytest.mark.parametrize("stage", ["transform", "chain", "batch_transform"])
def test_stored_bfloat16_is_given_as_bfloat16(tmp_path: Any, stage: str) -> None:
    def half(i: int) -> Any:
        return torch.tensor(i + 0.5).bfloat16()

    samples = [
        {
            "x": half(i).repeat(3),
            "n": half(i),
            "run": half(i).repeat(i),
            "parts": [half(i).repeat(2)],
        }
        for i in range(N)
    ]
    path = write_dataset(tmp_path / "set", N, 1, STORED_AS_BFLOAT16, samples)

    def doubled(given: dict[str, Any]) -> dict[str, Any]:
        runs = given["run"] if isinstance(given["run"], list) else [given["run"]]
        parts = given["parts"][0] if isinstance(given["parts"][0], list) else given["parts"]
        for each in (given["x"], given["n"], *runs, *parts):
            assert each.dtype == torch.bfloat16
        return {**given, "x": given["x"] * 2, "n": given["n"] * 2}

    function: Any = OnTensors(doubled)
    options = {"batch_transform": function} if stage[0] == "b" else {"transform": function}
    if stage == "chain":
        options = {"transform": Compose(function, dict)}
    with loader(path, **options) as made:
        batch = list(made)[1]
    assert batch["x"].dtype == batch["n"].dtype == batch["run"][0].dtype == torch.bfloat16
    assert batch["x"][:, 0].tolist() == batch["n"].tolist() == [9, 11, 13, 15]
    assert [run.tolist() for run in batch["run"]] == [[i + 0.5] * i for i in range(4, 8)]
    assert batch["parts"][0][0].tolist() == [4.5, 4.5]


def test_in_a_chain_pictures_are_arrays_before_and_after(folder: str) -> None:
    flipped = OnTensors(lambda sample: {"image": sample["image"].flip(-1)})
    chain = Compose(HorizontalFlip(1.0), flipped, HorizontalFlip(0.0))
    found = epoch(folder, transform=chain)
    assert np.array_equal(found, np.stack([_image(i) for i in range(N)]))
    assert epoch(folder, transform=chain, layout="CHW").shape == (N, 3, 8, 10)
    assert epoch(folder, transform=Compose(Record(), HorizontalFlip())).shape == (N, 8, 10, 3)


def test_a_transform_of_tensors_can_be_pickled_and_shows_its_function() -> None:
    made = pickle.loads(pickle.dumps(OnTensors(_halved)))
    assert made({"image": _image(0), "label": 1}, np.random.default_rng())["label"] == 1
    assert repr(made).startswith("OnTensors(<function _halved")


@pytest.mark.parametrize("layout", [None, "HWC"])
def test_functions_of_batches_are_given_tensors_of_the_batch(folder: str, layout: Any) -> None:
    seen = []

    def mixed(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        seen.append((tuple(batch["image"].shape), batch["label"].dtype))
        return {"image": batch["image"].flip(0), "label": batch["label"]}

    options: dict[str, Any] = {"batch_transform": OnTensors(mixed), "layout": layout}
    for transform in (None, OnTensors(_halved)):
        seen.clear()
        found = epoch(folder, transform=transform, tail="drop", **options)
        height = 8 if transform is None else 4
        assert set(seen) == {((BATCH, 3, height, 10), torch.int64)}
        expected = np.stack([_image(i)[:: 8 // height] for i in (3, 2, 1, 0)])
        if layout is None:
            expected = expected.transpose(0, 3, 1, 2)
        assert np.array_equal(found[:BATCH], expected)


NEEDS_TORCHVISION = "torchvision's transforms are tested where it is installed"


def v2() -> Any:
    return pytest.importorskip("torchvision.transforms.v2", reason=NEEDS_TORCHVISION)


def test_pictures_are_images_and_clips_videos_of_torchvision(folder: str, clips: str) -> None:
    v2()
    from torchvision import tv_tensors

    record = Record()
    for path in (folder, clips):
        with loader(path, transform=record) as made:
            next(iter(made))
    assert type(record.given[0]["image"]) is tv_tensors.Image
    assert type(record.given[0]["boxes"]) is torch.Tensor
    assert type(record.given[-1]["clip"]) is tv_tensors.Video
    assert record.given[-1]["clip"].shape == (5, 3, 8, 10)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_that_gives_arrays_to_torchvision_is_refused(
    folder: str, num_workers: int
) -> None:
    """Torchvision would return them unchanged, without a word."""
    transforms = v2()
    flip = transforms.RandomApply([transforms.RandomHorizontalFlip(1.0)], 1.0)
    said = (
        r"v2\.RandomHorizontalFlip returns arrays of NumPy unchanged"
        r".* transform=shardio\.transforms\.OnTensors\(f\)"
    )
    for function in (
        lambda sample: flip(sample),
        lambda sample: {"image": flip(sample["image"])},
        Compose(HorizontalFlip(), functools.partial(flip)),
    ):
        with (
            loader(folder, transform=function, num_workers=num_workers) as made,
            pytest.raises(TransformError, match=said),
        ):
            next(iter(made))
    image = _image(0)
    assert flip(image) is image  # as before, once the loader is closed


def test_a_function_that_converts_arrays_for_torchvision_is_not_refused(folder: str) -> None:
    transforms = v2()
    flip = transforms.RandomHorizontalFlip(1.0)
    flipped = np.stack([_image(i)[:, ::-1] for i in range(N)])
    for function in (
        lambda sample: {
            "image": transforms.Compose([transforms.ToImage(), flip])(sample["image"].copy())
        },
        lambda sample: {"image": flip(torch.tensor(sample["image"]).permute(2, 0, 1))},
        lambda sample: {
            "image": flip(
                {"raw": sample["image"], "image": torch.tensor(sample["image"]).permute(2, 0, 1)}
            )["image"]
        },
    ):
        found = epoch(folder, transform=function)
        assert np.array_equal(found.permute(0, 2, 3, 1), flipped)


def _usual(v2: Any) -> Any:
    return v2.Compose(
        [
            v2.RandomResizedCrop(6, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2)),
            v2.RandomErasing(),
        ]
    )


@pytest.mark.parametrize("start_method", ["zygote", "spawn", "thread"])
def test_torchvisions_transforms_give_the_same_for_any_workers(
    folder: str, start_method: str
) -> None:
    options = {"transform": _usual(v2()), "shuffle": True, "fields": ["image", "label"]}
    expected = epoch(folder, **options)
    assert expected.shape == (N, 3, 6, 6) and expected.dtype == torch.float32
    assert len({row.numpy().tobytes() for row in expected}) == N
    found = epoch(folder, **options, num_workers=2, start_method=start_method)
    assert torch.equal(found, expected)
    assert not torch.equal(epoch(folder, **options, seed=1), expected)


def test_the_result_is_that_of_torchvision_with_the_same_seed(folder: str) -> None:
    from torchvision import tv_tensors

    transform, states = _usual(v2()), []

    def noted(sample: dict[str, Any]) -> dict[str, Any]:
        states.append((int(sample["label"]), torch.get_rng_state()))
        return transform(sample)  # type: ignore[no-any-return]

    options: dict[str, Any] = {"shuffle": True, "fields": ["image", "label"], "seed": 5}
    found = epoch(folder, transform=OnTensors(noted), **options)
    with torch.random.fork_rng():
        for row, (label, state) in zip(found, states[-N:], strict=True):
            torch.set_rng_state(state)
            picture = tv_tensors.Image(torch.from_numpy(_image(label)).permute(2, 0, 1))
            assert torch.equal(row, transform({"image": picture})["image"])


def test_every_frame_of_a_clip_is_changed_alike(clips: str) -> None:
    found = epoch(clips, "clip", transform=_usual(v2()), num_workers=1)
    assert found.shape == (N, 5, 3, 6, 6)
    assert torch.equal(found, found[:, :1].expand_as(found))


def test_boxes_move_with_their_picture(folder: str) -> None:
    from torchvision import tv_tensors

    def with_boxes(sample: dict[str, Any]) -> dict[str, Any]:
        size = sample["image"].shape[-2:]
        boxes = tv_tensors.BoundingBoxes(sample["boxes"], format="XYXY", canvas_size=size)
        return {"image": sample["image"], "boxes": boxes}

    flip = v2().Compose([with_boxes, v2().RandomHorizontalFlip(1.0)])
    with loader(folder, transform=flip, num_workers=1) as made:
        batch = next(iter(made))
    assert [each.tolist() for each in batch["boxes"]] == [
        [[5.0, 2.0, 9.0, 6.0]] * (i % 3) for i in range(BATCH)
    ]
    assert np.array_equal(batch["image"][2], _image(2)[:, ::-1].transpose(2, 0, 1))


def test_cutmix_and_mixup_are_batch_transforms(folder: str) -> None:
    v, fields = v2(), ["label", "image"]
    for transform, mix in ((None, v.CutMix), (_usual(v), v.MixUp)):
        mixed = mix(num_classes=N)
        options: dict[str, Any] = {"fields": fields, "batch_transform": mixed}
        with loader(folder, transform=transform, **options) as made:
            batch = next(iter(made))
        side = (8, 10) if transform is None else (6, 6)
        assert batch["image"].shape == (BATCH, 3, *side)
        assert batch["label"].shape == (BATCH, N)
        assert torch.allclose(batch["label"].sum(1), torch.ones(BATCH))


def test_transforms_that_lack_an_earlier_one_are_named_with_it(folder: str, tmp_path: Path) -> None:
    v, fields = v2(), ["label", "image"]
    schema = Schema({"label": Array("int64"), "image": Array("uint8", (None, None, 3))})
    samples = [{"label": i, "image": _image(i)[: 5 + i % 2]} for i in range(N)]
    uneven = write_dataset(tmp_path / "uneven", N, 1, schema, samples)
    floats = r"\n  write v2\.ToDtype\(torch\.float32, scale=True\) before it"
    mix, normalize = v.MixUp(num_classes=N), v.Normalize((0.5,) * 3, (0.5,) * 3)
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (folder, {"transform": v.Compose([normalize])}, floats),
        (folder, {"batch_transform": mix}, floats),
        (uneven, {"batch_transform": mix}, r"\n  if the pictures .* transform=v2\.Resize\("),
    ]
    for path, options, words in wrong:
        with (
            loader(path, fields=fields, **options) as made,
            pytest.raises(TransformError, match=words),
        ):
            next(iter(made))


@pytest.mark.parametrize("taker", ["transform", "batch_transform"])
def test_transforms_of_version_1_are_refused_with_what_to_write(folder: str, taker: str) -> None:
    v2()
    from torchvision import transforms

    for made in (transforms.Compose([]), transforms.RandomCrop(3)):
        with pytest.raises(InvalidArgument, match=r"write torchvision\.transforms\.v2\.(Com|Ran)"):
            loader(folder, **{taker: made})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_map_view_gives_what_torchvision_makes(folder: str, num_workers: int) -> None:
    from torch.utils.data import DataLoader

    view = MapView(folder, transform=_usual(v2()), fields=["image", "label"])
    with view:
        batches = list(DataLoader(view, batch_size=5, num_workers=num_workers))
    assert [batch["image"].shape for batch in batches] == [(5, 3, 6, 6)] * 2
    assert torch.cat([batch["label"] for batch in batches]).tolist() == list(range(N))


def test_mistaken_transforms_are_refused_with_what_to_write(folder: str) -> None:
    v = v2()
    from torchvision import transforms as v1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision deprecates it
        to_tensor = v.ToTensor()
    mix, mixes = v.CutMix(num_classes=N), r"CutMix \(in %s\) mixes .*: write batch_transform="
    mistakes: list[tuple[Any, str]] = [
        (v.MixUp(num_classes=N), r"mixes the samples of a batch: write batch_transform="),
        (v.RandomChoice([mix, v.MixUp(num_classes=N)]), mixes % "RandomChoice"),
        (v.RandomOrder([v.Identity(), mix]), mixes % "RandomOrder"),
        (v.RandomApply([mix]), mixes % "RandomApply"),
        (v.RandomApply(torch.nn.ModuleList([mix])), mixes % "RandomApply"),
        (v.Compose([v.Identity(), v.RandomChoice([mix])]), mixes % "Compose"),
        (torch.nn.Sequential(v.Identity(), mix), mixes % "Sequential"),
        (Compose(v.Identity(), mix), mixes % "Compose"),
        (OnTensors(mix), mixes % "OnTensors"),
        ([v.RandomHorizontalFlip()], r"must be callable, such as .*Compose\(a, b\)"),
        (HorizontalFlip, r"the class HorizontalFlip; pass an instance"),
        (to_tensor, r"as they are, uint8: write v2\.ToDtype\(torch\.float32, scale=True\)"),
        (v.Compose([v.Compose([v.Resize(6), to_tensor])]), r"write v2\.ToDtype\(torch\.fl"),
        (v1.ToTensor(), r"write torchvision\.transforms\.v2\.ToDtype\(torch\.float32, "),
    ]
    for transform, words in mistakes:
        with pytest.raises(InvalidArgument, match=words):
            loader(folder, transform=transform)
    with pytest.raises(InvalidArgument, match=r"the class RandomHorizontalFlip; pass an instance"):
        OnTensors(v.RandomHorizontalFlip)
    for wrong in (HorizontalFlip(), v.Compose([HorizontalFlip()])):
        with pytest.raises(TransformError, match=r"write shardio\.transforms\.Compose\(…\)"):
            epoch(folder, transform=OnTensors(wrong), fields=["image"])
    with pytest.raises(TransformError, match=r"a sample has no fields: return the fields to keep"):
        epoch(folder, transform=lambda sample: {})
    with pytest.raises(
        InvalidArgument, match=r"A function collates all fields of a batch: pass collate=f"
    ):
        loader(folder, collate={"image": np.stack})


def test_to_tensor_converts_an_image_of_pillow(folder: str) -> None:
    v = v2()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision deprecates it
        to_tensor = v.ToTensor()
    chain = v.Compose([v.ToPILImage(), v.Resize((8, 10)), to_tensor])
    found = epoch(folder, transform=chain, fields=["image"])
    stored = epoch(folder, layout="CHW", fields=["image"])
    assert torch.equal(found, stored.float() / 255)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of pictures of unequal sizes, and lists of pictures, of which the first is empty."""
    kind = Array("uint8", (None, None, 3))
    schema = Schema({"image": kind, "views": List(kind)})
    samples = ({"image": _image(i)[i:], "views": [_image(i)] * (i % 3)} for i in range(4))
    return write_dataset(tmp_path_factory.mktemp("uneven") / "set", 4, 1, schema, samples)


@pytest.mark.parametrize("option", ["transform", "batch_transform"])
@pytest.mark.parametrize("layout", [None, "CHW", "HWC"])
def test_pictures_in_lists_are_given_and_arrive_as_others(
    uneven: str, option: str, layout: Any
) -> None:
    given: list[Any] = []

    def halved(fields: dict[str, Any]) -> dict[str, Any]:
        images = fields["image"] if option == "batch_transform" else [fields["image"]]
        given.extend(images)
        halves = [each[:, ::2] for each in images]
        return {**fields, "image": halves if option == "batch_transform" else halves[0]}

    with loader(uneven, layout=layout, **{option: OnTensors(halved)}) as made:
        batch = next(iter(made))
    assert all(each.shape[0] == 3 and each.shape[2] == 10 for each in given)
    axes = (0, 1, 2) if layout == "HWC" else (2, 0, 1)
    for i in range(4):
        assert np.array_equal(batch["image"][i], _image(i)[i::2].transpose(axes))
        assert len(batch["views"][i]) == i % 3
        for view in batch["views"][i]:
            assert np.array_equal(view, _image(i).transpose(axes))


def test_in_a_chain_pictures_in_lists_are_arrays_behind_a_module(uneven: str) -> None:
    def kinds(sample: dict[str, Any]) -> dict[str, Any]:
        found = [f"{type(each).__name__} {each.shape}" for each in sample["views"]]
        return {"kinds": " ".join(found)}

    with loader(uneven, transform=Compose(torch.nn.Identity(), kinds)) as made:
        assert next(iter(made))["kinds"][1] == "ndarray (8, 10, 3)"


@pytest.mark.parametrize("layout", [None, "CHW", "HWC"])
def test_masks_of_padded_pictures_have_the_axes_of_the_pictures(uneven: str, layout: Any) -> None:
    def checked(batch: dict[str, Any]) -> dict[str, Any]:
        assert batch["image_mask"].shape == batch["image"].shape == (4, 3, 8, 10)
        assert type(batch["image_mask"]) is torch.Tensor
        return batch

    options: dict[str, Any] = {"collate": {"image": "pad"}, "fields": ["image"]}
    with loader(uneven, layout=layout, batch_transform=OnTensors(checked), **options) as made:
        batch = next(iter(made))
    assert batch["image"].shape == batch["image_mask"].shape
    assert batch["image"].shape[-1 if layout == "HWC" else 1] == 3
    assert batch["image_mask"][3].sum() == 5 * 10 * 3
