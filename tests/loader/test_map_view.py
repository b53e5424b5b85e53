"""MapView gives by number what a loader gives in batches, also in other processes."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.errors import ClosedError, TransformError
from shardio.map_view import MapView
from shardio.media import encode_jpeg
from shardio.samples.view import RowView

pytest.importorskip("simplejpeg", reason="pictures are decoded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("map") / "set"
    rng = np.random.default_rng(0)
    schema = {"x": shardio.Array("float32", (3,)), "name": shardio.Text(), "image": shardio.Image()}
    samples = (
        {
            "x": np.full(3, i, "f4"),
            "name": f"ü{i}",
            "image": encode_jpeg(rng.integers(0, 255, (8, 8 + i % 2, 3), np.uint8)),
        }
        for i in range(10)
    )
    shardio.convert(samples, out, schema=shardio.Schema(schema), shard_bytes=1000)
    return out


def test_samples_are_what_a_loader_gives(folder: Path) -> None:
    with (
        MapView(folder) as view,
        shardio.ShardLoader(folder, 1, output="numpy", num_workers=0) as loader,
    ):
        assert len(view) == 10
        for i, batch in enumerate(loader):
            sample = view[i]
            assert list(sample) == list(batch) and sample["name"] == f"ü{i}"
            assert np.array_equal(sample["image"], batch["image"][0])


def test_what_is_no_integer_is_no_number_of_a_sample(folder: Path) -> None:
    with MapView(folder, fields=["x"]) as view:
        for index in (1.7, "1", slice(0, 2), None):
            with pytest.raises(TypeError, match=r"view\[i\] takes the integer index"):
                view[index]  # type: ignore[index]
        assert view.__getitems__(np.arange(3, 4, dtype=np.uint8))[0]["x"].tolist() == [3, 3, 3]


def test_several_samples_come_in_the_order_asked_for(folder: Path) -> None:
    with MapView(folder, fields=["x"]) as view:
        for asked in ([3, 1], [7, 7, -1, 0], [5], [], list(range(10))):
            found = view.__getitems__(asked)
            assert [sample["x"][0] for sample in found] == [i % 10 for i in asked]
            assert all(list(sample) == ["x"] for sample in found)
        first = view[2]["x"]
        first += 1  # a copy of its own
        assert view[2]["x"].tolist() == [2, 2, 2]
        assert isinstance(view[0]["x"], np.ndarray)


def test_a_number_beyond_the_samples_is_an_index_error(folder: Path) -> None:
    with MapView(folder) as view:
        for number in (10, -11):
            with pytest.raises(IndexError, match=f"sample {number} of 10"):
                view[number]
        assert len(list(view)) == 10  # type: ignore[call-overload]


def test_options_say_what_a_sample_is(folder: Path) -> None:
    factor = 2
    with MapView(folder, transform=lambda s: {"y": s["x"] * factor}, fields=["x"]) as view:
        assert view[3]["y"].tolist() == [6, 6, 6]
    with MapView(folder, decode=False) as view:
        assert bytes(view[0]["image"][:2]) == b"\xff\xd8"
    with pytest.raises(TypeError, match="no option 'shuffle': its options are fields, transform"):
        MapView(folder, shuffle=True)
    with pytest.raises(TypeError, match=r"no option 'clip': write .*\.clips\("):
        MapView(folder, clip=None)
    with pytest.raises(TypeError, match="no option 'output': torch's DataLoader makes tensors of"):
        MapView(folder, output="torch")
    with MapView(folder) as view:
        for name, hint in (("classes", r"write shardio\.open\(path\)\.classes, and"), ("x", "")):
            with pytest.raises(AttributeError, match=f"no attribute '{name}'(: )?{hint}"):
                getattr(view, name)
        with pytest.raises(TypeError, match=r"for one field \[sample\[name\] for sample in view\]"):
            view["x"]  # type: ignore[index]
    with shardio.open(folder) as dataset, MapView(dataset.select([4, 2]), fields=["x"]) as view:
        assert [view[i]["x"][0] for i in range(len(view))] == [4, 2]


def test_a_mixture_is_refused_with_the_way_out(folder: Path) -> None:
    with shardio.mix([folder, folder], weights=[1, 1]) as mixture:
        for given in (mixture, RowView(mixture)):
            with pytest.raises(shardio.InvalidArgument, match="MapView of each source"):
                MapView(given)


def test_a_view_is_pickled_with_its_options_and_used_after_a_fork(folder: Path) -> None:
    with MapView(folder, transform=lambda s: {"y": s["x"] + 1}, fields=["x"]) as view:
        assert view[1]["y"][0] == 2
        with pickle.loads(pickle.dumps(view)) as other:
            assert other[5]["y"][0] == 6
        pid = os.fork()
        if not pid:
            code = 1
            try:
                code = int(view[8]["y"][0] != 9)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert view[2]["y"][0] == 3
    with pytest.raises(ClosedError, match=r"the view is closed: create another one, MapView\("):
        view[0]


def test_a_path_is_shown_as_given_and_read_after_a_chdir(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)

    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(sample["name"])

    with MapView("set", transform=fail) as failing, MapView("set") as view:
        assert repr(view) == "MapView('set': 10 samples)"
        with pytest.raises(TransformError, match=r"shard 000000-000\.shard of set \("):
            failing[0]
        monkeypatch.chdir(tmp_path)
        assert view[3]["name"] == "ü3"
        assert repr(view) == f"MapView({str(folder)!r}: 10 samples)"
        with pickle.loads(pickle.dumps(view)) as other:
            assert other[3]["name"] == "ü3"


def test_launchers_do_not_divide_a_view(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with MapView(folder, fields=["x"]) as view:
        assert len(view) == 10 and view[0]["x"][0] == 0


def _with_draws(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    draws = [rng.random(), random.random(), np.random.random()]
    return {"x": sample["x"], "draws": np.array(draws)}


def test_what_a_transform_draws_follows_from_pythons_generator(folder: Path) -> None:
    def draws(seed: int) -> list[float]:
        random.seed(seed)  # as torch's DataLoader does in each of its workers
        with MapView(folder, fields=["x"], transform=_with_draws) as view:
            return [draw for i in (0, 1) for draw in view[i]["draws"].tolist()]

    assert draws(1) == draws(1)
    assert len({*draws(1), *draws(2)}) == 12


@pytest.mark.external
def test_workers_of_torchs_dataloader_draw_differently_in_every_epoch(folder: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is too large for the extra dev")
    view = MapView(folder, fields=["x"], transform=_with_draws)
    loader = torch.utils.data.DataLoader(
        view, batch_sampler=[[0, 1, 2], [3, 4]], num_workers=2, multiprocessing_context="fork"
    )

    def epoch() -> list[float]:
        return torch.cat([batch["draws"] for batch in loader]).flatten().tolist()  # type: ignore[no-any-return]

    torch.manual_seed(7)
    found = epoch() + epoch()
    assert len(found) == len(set(found)) == 30
    torch.manual_seed(7)
    assert epoch() == found[:15]
    view.close()


def test_clips_of_videos_are_samples(tmp_path: Path) -> None:
    from shardio_tools import sample_clips

    sample_clips.write_clips(tmp_path / "videos", n_clips=1)
    shardio.convert(tmp_path / "videos", tmp_path / "out", workers=0)
    clips = shardio.open(tmp_path / "out").clips(4, size=(32, 32))
    with MapView(clips) as view:
        found = view.__getitems__([0, len(view) - 1])
        assert [sample["frames"].shape for sample in found] == [(4, 32, 32, 3)] * 2
