"""Data that names files in UTF-8 finds them in a locale of ASCII, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from shardio.dataset.manifest import load
from tests.ascii_locale import Ran, run_commands

MADE = Path(__file__).parent / "made"


def _mds(folder: Path) -> None:
    """Shards whose index names them."""
    shutil.copytree(MADE / "mds" / "plain", folder)
    index = json.loads((folder / "index.json").read_text("utf-8"))
    for entry in index["shards"]:
        name = entry["raw_data"]["basename"]
        entry["raw_data"]["basename"] = f"ß-{name}"
        (folder / name).rename(folder / f"ß-{name}")
    (folder / "index.json").write_text(json.dumps(index))


def _arrow(folder: Path) -> None:
    """Return a table that the state of a Hugging Face data set lists."""
    folder.mkdir()
    table = pa.table({"größe": [1, 2]})
    with pa.ipc.new_stream(str(folder / "datä.arrow"), table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "datä.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))


def _zarr(folder: Path) -> None:
    """Return a store with an array in a group."""
    group = zarr.open_group(str(folder / "störe.zarr"), mode="w").create_group("grüppe")
    group["ß"] = np.arange(6).reshape(2, 3)


def _lerobot(folder: Path) -> None:
    """Episodes whose folders of data and of a camera are named by patterns."""
    shutil.copytree(MADE / "lerobot" / "arm", folder)
    before, after = "observation.images.front", "vörn"
    info = folder / "meta" / "info.json"
    text = info.read_text("utf-8").replace(before, after).replace("data/chunk", "dätä/chunk")
    info.write_text(text, "utf-8")
    (folder / "data").rename(folder / "dätä")
    (folder / "videos" / before).rename(folder / "videos" / after)
    for path in [*(folder / "meta" / "episodes").rglob("*.parquet")]:
        table = pq.read_table(path)
        names = [name.replace(before, after) for name in table.column_names]
        pq.write_table(table.rename_columns(names), path.with_name("épisodes.parquet"))
        path.unlink()


KINDS = {"mds": _mds, "arrow": _arrow, "zarr": _zarr, "lerobot": _lerobot}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    for kind, make in KINDS.items():
        (root / kind).mkdir()
        make(root / kind / "klaß")
    return root


@pytest.fixture(scope="module")
def ran(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    commands = [("convert", kind, f"{kind}-ß", "--kind", kind, "--workers", "0") for kind in KINDS]
    found = run_commands(commands, folder, tmp_path_factory.mktemp("outputs"))
    return dict(zip(KINDS, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_data_names_are_found(kind: str, ran: dict[str, Ran], folder: Path) -> None:
    assert ran[kind].code == 0, ran[kind]
    inputs = load(folder / f"{kind}-ß").inputs
    assert {one["outcome"] for one in inputs} == {"converted", "part"}
    assert {one["path"].partition("/")[0] for one in inputs} == {"klaß"}
