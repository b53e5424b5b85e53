"""The commands that are for finished datasets: what they print, their options and exit codes."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

import shardio
import shardio.transforms
from shardio.format.layout import Kind
from shardio.media import encode_jpeg
from shardio_tools import cli
from tests.maintenance.datasets import LABELS, labelled, place, shard_of, write
from tests.shards import flip

Capture = pytest.CaptureFixture[str]


def make(folder: Path, n: int = 12, n_shards: int = 3, *, first: int = 0) -> Path:
    """Return a dataset of two classes."""
    samples = labelled(n, first=first)
    return write(folder, n, n_shards, schema=LABELS, samples=samples, classes=["a", "b"])


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return make(tmp_path / "d")


def sources(path: Path) -> list[str]:
    with shardio.open(path) as dataset:
        return [sample["source"] for sample in dataset]


def test_repair_lists_repaired_and_lost(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    flip(shard_of(dataset, 0), 20)
    flip(shard_of(dataset, 1), place(shard_of(dataset, 1), Kind.PAYLOAD)[0])
    shard_of(dataset, 2).unlink()
    assert cli.main(["repair", str(dataset), str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    mended, sample, shard, summary = out.splitlines()
    assert mended == "000000-000.shard: repaired: the first page is restored from the last"
    assert sample.startswith("000000-001.shard: lost: sample 0: field 'source': the data of")
    assert shard == "000000-002.shard: lost: samples 0 to 3: there is no such shard"
    assert summary == f"repaired 3 shards: 7 samples saved, 5 lost: {tmp_path / 'out'}"
    assert "repairing: 100%" in err
    assert len(sources(tmp_path / "out")) == 7


def test_repair_reports_in_json_and_quietly(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    (dataset / "dataset.json").unlink()
    (dataset / "generations" / "000001.json").unlink()
    shard_of(dataset, 2).write_bytes(b"x" * 9000)
    out = tmp_path / "out"
    assert cli.main(["repair", str(dataset), str(out), "--json"]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert (report["samples"], report["lost"], report["dataset"]) == (8, 0, str(out))
    assert [shard["outcome"] for shard in report["shards"]] == ["sound", "sound", "lost"]
    assert report["shards"][2]["lost"][0]["first"] is None
    assert cli.main(["repair", str(dataset), str(tmp_path / "again")]) == 1
    assert "0 or more lost" in capsys.readouterr().out
    assert cli.main(["repair", str(dataset), str(tmp_path / "quiet"), "--quiet"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert cli.main(["repair", str(out), str(tmp_path / "whole")]) == 0
    assert "8 samples saved, nothing lost" in capsys.readouterr().out


def test_diff_names_the_samples_that_differ(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    samples = labelled(12)
    samples[5]["source"] = "another"
    other = write(tmp_path / "b", 12, 1, schema=LABELS, samples=samples, classes=["a", "b"])
    assert cli.main(["diff", str(dataset), str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Samples that differ",
        "  sample  fields",
        "       5  source",
        "",
        f"compared {dataset} with {other}: 12 samples: 1 differ",
    ]
    assert cli.main(["diff", str(dataset), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["changed"] == [{"sample": 5, "fields": ["source"]}]
    for arguments, code in ((("--quiet",), 1), ((), 0)):
        second = other if code else dataset
        assert cli.main(["diff", str(dataset), str(second), *arguments]) == code
    assert capsys.readouterr().out.endswith(": 12 samples: all the same\n")


def test_diff_says_what_only_one_side_has(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    other = write(tmp_path / "b", 5, 1, schema=LABELS, samples=labelled(5))
    assert cli.main(["diff", str(other), str(dataset)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["the classes differ", "", "Samples only in B", "   5"]
    assert lines[-1].endswith("5 and 12 samples: 0 only in A, 7 only in B")
    bare = write(tmp_path / "c", 12, 3, schema=LABELS, samples=labelled(12))
    assert cli.main(["diff", str(bare), str(dataset)]) == 1
    assert "the samples' common fields are the same" in capsys.readouterr().out


def test_merge_puts_datasets_together(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    other, out = make(tmp_path / "b", 4, 1, first=50), tmp_path / "out"
    assert cli.main(["merge", str(out), str(dataset), str(other)]) == 2  # the former order
    assert "out: " in capsys.readouterr().err and not out.exists()
    assert cli.main(["merge", str(dataset), str(other), str(out), "--workers", "0"]) == 0
    said, err = capsys.readouterr()
    assert said.startswith("merged 2 datasets: 16 samples in 4 shards, ")
    assert said.endswith(f", generation 1: {out}\n")
    assert "verifying: 100%" in err and "writing: 100%" in err and "4 of 4 shards" in err
    assert sources(out) == sources(dataset) + sources(other)


@pytest.mark.process
def test_reshard_to_a_shard_size(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["reshard", str(dataset), str(tmp_path / "out"), "--workers", "1"]
    assert cli.main([*arguments, "--shard-bytes", "1"]) == 0
    assert capsys.readouterr().out.startswith("resharded: 12 samples in 12 shards, ")
    arguments[2] = str(tmp_path / "one")
    assert cli.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out)["n_shards"], captured.err) == (1, "")


def test_compact_tidies_up_and_removes_what_is_old(dataset: Path, capsys: Capture) -> None:
    assert cli.main(["compact", str(dataset), "--workers", "0"]) == 0
    assert "compacted into 1 new shard: 12 samples in 1 shard, " in capsys.readouterr().out
    assert len(list(dataset.glob("*.shard"))) == 4
    assert cli.main(["compact", str(dataset), "--remove-old"]) == 0
    assert "nothing to compact, 3 old shards removed: " in capsys.readouterr().out
    assert len(list(dataset.glob("*.shard"))) == 1
    assert cli.main(["compact", str(dataset), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.main(["compact", str(dataset), "--shard-bytes", "0"]) == 2


def test_damaged_data_is_refused_with_code_1_in_one_line(dataset: Path, capsys: Capture) -> None:
    flip(shard_of(dataset, 1), place(shard_of(dataset, 1), Kind.PAYLOAD)[0])
    assert cli.main(["compact", str(dataset), "--workers", "0", "--quiet"]) == 1
    said, err = capsys.readouterr()
    assert (said, err.count("\n")) == ("", 1)
    assert "damaged, and was not touched" in err and "shardio repair" in err


def test_split_reports_counts_and_inspect_agrees(dataset: Path, capsys: Capture) -> None:
    command = ["split", str(dataset), "--parts", "train=0.75,val=0.25"]
    assert cli.main([*command, "--group", "source", "--seed", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  subset  samples  groups",
        "  train         9       9",
        "  val           3       3",
        f"split 12 samples into 2 subsets, generation 2: {dataset}",
    ]
    assert cli.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["n_samples"], report["generation"]) == ({"train": 9, "val": 3}, 3)
    assert report["replaced"] == ["train", "val"]
    assert cli.main(command) == 0
    assert "\nreplaced the subsets train, val\nsplit 12 samples" in capsys.readouterr().out
    assert cli.main(["inspect", str(dataset), "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "Subsets\n  subset  samples\n  train         9\n  val           3\n" in out
    assert 'made by     split group=null parts={"train": 0.75, "val": 0.25} seed=0\n' in out


@pytest.mark.parametrize("arguments", ["repair no out", "repair DATA DATA", "diff DATA no"])
def test_bad_places_exit_2_in_one_line(dataset: Path, arguments: str, capsys: Capture) -> None:
    given = arguments.replace("no", str(dataset / "no")).replace("DATA", str(dataset))
    assert cli.main(given.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "parts", ["train", "=1", "a=x", "a=0.5,a=0.5", "a=0.5,,b=0.5", "a=0.7,b=0.7", "a=2"]
)
def test_split_refuses_bad_parts_with_code_2(dataset: Path, capsys: Capture, parts: str) -> None:
    try:
        code: object = cli.main(["split", str(dataset), "--parts", parts])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert capsys.readouterr().err


def test_stats_are_shown_and_kept_for_inspect(dataset: Path, capsys: Capture) -> None:
    assert cli.main(["stats", str(dataset)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "  field  mean  std  min  max  count",
        "  label     –    –    0    1     12",
        "",
        "Classes",
        "  class  samples",
        "  a            6",
        "  b            6",
        "",
        f"computed statistics of 12 samples, stored in generation 2: {dataset}",
    ]
    assert "counting: 100%" in err
    assert cli.main(["inspect", str(dataset)]) == 0
    assert "Statistics\n  field  mean" in capsys.readouterr().out
    assert cli.main(["split", str(dataset), "--parts", "s=1", "--quiet"]) == 0
    assert cli.main(["stats", str(dataset), "--subset", "s", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["subset"], report["fields"]["label"]["count"]) == ("s", 12)
    assert cli.main(["inspect", str(dataset)]) == 0
    assert "Statistics of subset s\n" in capsys.readouterr().out
    assert cli.main(["stats", str(dataset), "--subset", "no", "--quiet"]) == 2


@pytest.mark.filterwarnings("default")
def test_stats_of_a_read_only_dataset_are_shown(
    dataset: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("shardio.dataset.manifest.lock_folder", refuse)
    assert cli.main(["stats", str(dataset)]) == 3
    out, err = capsys.readouterr()
    assert "  label     –    –    0    1     12" in out.splitlines()
    why = f"{dataset}: the dataset is read-only (Read-only file system)"
    assert out.endswith(f"\ncomputed statistics of 12 samples, not stored: {why}\n")
    assert f"shardio: warning: {why}: its statistics are not stored\n" in err
    assert cli.main(["stats", str(dataset), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["not_stored"].startswith("the dataset is read-only")
    with shardio.open(dataset) as opened:
        assert opened.stats == {}


def test_stats_say_what_is_unusual_about_a_field(tmp_path: Path, capsys: Capture) -> None:
    schema = shardio.Schema({"x": shardio.Array("float32", (None, 2)), "t": shardio.Text()})
    samples = [{"x": np.full((i, 2), [1, np.nan], np.float32), "t": ""} for i in range(3)]
    folder = write(tmp_path / "x", 3, schema=schema, samples=samples)
    assert cli.main(["stats", str(folder)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split(maxsplit=6)[-1] == "3 not finite, shapes 0 × 2 to 2 × 2"


def test_numbers_of_stats_are_aligned_at_the_point(tmp_path: Path, capsys: Capture) -> None:
    schema = shardio.Schema({name: shardio.Array("float64") for name in ("a", "bb", "c")})
    folder = write(tmp_path / "x", 1, schema=schema, samples=[{"a": 1.25, "bb": -1000.5, "c": 7}])
    assert cli.main(["stats", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "  field      mean  std       min       max  count",
        "  a          1.25    0      1.25      1.25      1",
        "  bb     -1000.5     0  -1000.5   -1000.5       1",
        "  c          7       0      7         7         1",
    ]


def test_stats_of_pixels_are_printed_as_a_normalize(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    fields = {"image": shardio.Image(), "mask": shardio.Array("uint8", (4, 4, 3))}
    grey = encode_jpeg(np.full((8, 8, 3), 51, np.uint8))
    samples = [{"image": grey, "mask": np.full((4, 4, 3), 255 * i, np.uint8)} for i in range(2)]
    folder = str(tmp_path / "x")
    with shardio.DatasetWriter(folder, shardio.Schema(fields)) as writer:
        for sample in samples:
            writer.append(sample)
    assert cli.main(["stats", folder]) == 0
    out = capsys.readouterr().out
    mask = "Normalize(mean=(0.5000, 0.5000, 0.5000), std=(0.5000, 0.5000, 0.5000)"
    assert f"\n  {mask})\n" in out
    assert "\nimage: no statistics of pixels; --decode computes them\n" in out
    assert cli.main(["stats", folder, "--decode", "--workers", "0", "--frames", "all"]) == 0
    out = capsys.readouterr().out
    assert f"\n  {mask}, fields='mask')\n" in out and "not counted" not in out
    image = "Normalize(mean=(0.2000, 0.2000, 0.2000), std=(0.0000, 0.0000, 0.0000), fields='image')"
    assert f"\n  {image}\n" in out
    (line,) = [line for line in out.splitlines() if line.startswith(f"  {mask}")]
    assert repr(eval(line, vars(shardio.transforms))).startswith("Normalize(mean=(0.5, 0.5, 0.5)")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["stats", folder, "--frames", "some"])
    assert "expected a number from 1 up, or all; found 'some'" in capsys.readouterr().err
