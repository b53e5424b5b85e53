"""Exports as a whole: refused fields, damaged samples, and the output folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import Array, Bytes, InvalidArgument, List, Schema, ShardCorrupt, Text
from shardio.dataset.transaction import NewFolder
from shardio.errors import DatasetExists, UnsupportedEnvironment
from shardio.export import api, export
from shardio.export.formats import distinct_names, safe_part, safe_path
from shardio.format.layout import Kind
from shardio.maintenance import add_subset, split
from shardio.storage import fs
from shardio_tools import cli
from tests.faults.failing import FailingDisk
from tests.maintenance.datasets import LABELS, labelled, place, shard_of, tree, write
from tests.shards import flip

pytestmark = pytest.mark.usefixtures("quick_disk")
FORMATS = ("files", "parquet", "webdataset")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write(tmp_path / "d", 12, 3, schema=LABELS, samples=labelled(12), classes=["a", "b"])


def damage(dataset: Path) -> None:
    """Flip a bit of the text of sample 4."""
    flip(shard_of(dataset, 1), place(shard_of(dataset, 1), Kind.PAYLOAD)[0])


def table(out: Path) -> list[dict[str, Any]]:
    """Return the lines of an export to files."""
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("format", FORMATS)
def test_progress_reports_sync(format: str, dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    states: list[api.ExportProgress] = []
    export(dataset, tmp_path / "out", format, progress=states.append)
    assert [state.is_syncing for state in states] == [False] * (len(states) - 1) + [True]
    assert states[-1].n_samples_done == states[-1].n_samples == 12
    assert cli.main(["export", str(dataset), str(tmp_path / "two"), f"--format={format}"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("writing to the disk: 100% of ")


def test_the_report_names_subsets_that_are_dropped(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(dataset, tmp_path / "0", "files").subsets_dropped == ()
    add_subset(dataset, "keep", [0, 3])
    assert export(dataset, tmp_path / "1", "files").subsets_dropped == ("keep",)
    assert export(dataset, tmp_path / "2", "files", subset="keep").subsets_dropped == ()
    assert cli.main(["export", str(dataset), str(tmp_path / "3"), "--format=files"]) == 0
    assert "not exported: the subsets keep; --subset NAME exports" in capsys.readouterr().out


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_sample_aborts_or_is_skipped(format: str, dataset: Path, tmp_path: Path) -> None:
    damage(dataset)
    with pytest.raises(ShardCorrupt) as caught:
        export(dataset, tmp_path / "out", format)
    assert "sample 4 of the dataset" in caught.value.__notes__[0]
    assert entries(tmp_path) == ["d"]
    report = export(dataset, tmp_path / "out", format, on_error="skip")
    assert (report.n_samples, [one.sample for one in report.skipped]) == (11, [4])
    assert "field 'source'" in report.skipped[0].reason
    assert (report.out, report.format) == (str(tmp_path / "out"), format)
    assert report.fields == ("label", "source")
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert (report.n_files, report.n_bytes) == (
        len(written),
        sum(path.stat().st_size for path in written),
    )
    about = json.loads((tmp_path / "out" / "_export.json").read_text())
    with shardio.open(dataset) as opened:
        assert about == {
            "format": format,
            "samples": 11,
            "fields": ["label", "source"],
            "classes": ["a", "b"],
            "lineage": opened.lineage,
            "generation": 1,
            "subset": None,
            "skipped": [4],
            "files": len(written),
            "shardio": shardio.__version__,
        }
    if format == "files":
        sources = [line["source"] for line in table(tmp_path / "out")]
        assert sources == [f"clip {i}" for i in range(12) if i != 4]


@pytest.mark.parametrize("format", FORMATS)
def test_an_empty_dataset_is_exported(format: str, tmp_path: Path) -> None:
    shardio.DatasetWriter(tmp_path / "d", LABELS).close()
    assert export(tmp_path / "d", tmp_path / "out", format).n_samples == 0


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_dataset_gives_the_same_bytes(format: str, dataset: Path, tmp_path: Path) -> None:
    export(dataset, tmp_path / "one", format)
    export(dataset, tmp_path / "two", format)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


REFUSED: list[tuple[str, Any, str]] = [
    ("parquet", Array("int8", (2, None)), "after the first varies"),
    ("parquet", List(Array("int8", (None, None))), "after the first varies"),
    ("webdataset", List(Array("int8")), "cannot hold a list of arrays"),
    ("files", List(Array("int8")), "a file cannot hold a list"),
]


@pytest.mark.parametrize(("format", "field", "why"), REFUSED)
def test_unsupported_field_is_refused(format: str, field: Any, why: str, tmp_path: Path) -> None:
    shardio.DatasetWriter(tmp_path / "d", Schema({"odd": field, "n": Array("int64")})).close()
    with pytest.raises(InvalidArgument, match=f"field 'odd': .*{why}.*--fields n"):
        export(tmp_path / "d", tmp_path / "out", format)
    assert entries(tmp_path) == ["d"]
    assert export(tmp_path / "d", tmp_path / "out", format, fields=["n"]).fields == ("n",)


def test_a_sample_without_members_is_refused_for_a_tar(tmp_path: Path) -> None:
    with shardio.DatasetWriter(tmp_path / "d", Schema({"t": Text(optional=True)})) as writer:
        writer.append({})
    with pytest.raises(InvalidArgument, match="sample 0 has none of the fields"):
        export(tmp_path / "d", tmp_path / "out", "webdataset")
    assert entries(tmp_path) == ["d"]


@pytest.mark.parametrize("names", [("A", "a"), ("x", "X.y"), ("a/b", "c")])
def test_ambiguous_member_names_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    schema = Schema({name: Bytes() for name in names})
    shardio.DatasetWriter(tmp_path / "d", schema).close()
    with pytest.raises(InvalidArgument) as caught:
        export(tmp_path / "d", tmp_path / "out", "webdataset")
    assert str(caught.value).startswith(f"{tmp_path / 'd'}: ")
    assert names[0].lower() in str(caught.value)
    assert entries(tmp_path) == ["d"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"format": "zip"}, "format must be one of 'files', 'parquet', 'webdataset'; found 'zip'$"),
        ({"on_error": "ignore"}, "on_error must be one of 'stop', 'skip'; found 'ignore'$"),
        ({"shard_bytes": 0}, "^shard_bytes is 0; it must be 1 or more$"),
        ({"fields": ["nothing"]}, "d: no field 'nothing'; the fields are label, source$"),
        ({"fields": []}, "d: fields is empty; the fields are label, source$"),
        ({"subset": "nothing"}, "no subset 'nothing'; there are: none"),
    ],
)
def test_options_are_checked(
    options: dict[str, Any], text: str, dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        export(dataset, tmp_path / "out", **{"format": "files", **options})
    assert entries(tmp_path) == ["d"]


def test_only_an_export_is_overwritten(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(dataset, out, "files")
    before = tree(out)
    with pytest.raises(DatasetExists) as caught:
        export(dataset, out, "webdataset")
    expected = (
        f"{out}: already holds an export; overwrite=True (--overwrite) replaces it; or choose "
        "another folder"
    )
    assert str(caught.value) == expected
    assert tree(out) == before
    export(dataset, out, "webdataset", overwrite=True)
    assert entries(out) == ["000000.tar", "_export.json"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(DatasetExists) as caught:
        export(dataset, tmp_path / "mine", "files", overwrite=True)
    assert "holds 'thesis.txt', not an export, which overwrite does not replace" in str(
        caught.value
    )
    assert entries(tmp_path / "mine") == ["thesis.txt"]
    for added in (out / "notes.txt", out / "extra" / "notes.txt"):
        added.parent.mkdir(exist_ok=True)
        added.write_text("mine")
        before = tree(out)
        with pytest.raises(DatasetExists, match="holds 3 files, of which the export wrote 2; over"):
            export(dataset, out, "files", overwrite=True)
        assert tree(out) == before
        added.unlink()
    for about in ("", "[]", "{}"):
        (tmp_path / "mine" / "_export.json").write_text(about)
        with pytest.raises(DatasetExists, match="added cannot be told apart: remove"):
            export(dataset, tmp_path / "mine", "files", overwrite=True)
        assert entries(tmp_path / "mine") == ["_export.json", "thesis.txt"]
    with pytest.raises(
        DatasetExists, match=r"thesis\.txt: expected a folder, found a link or file"
    ):
        export(dataset, tmp_path / "mine" / "thesis.txt", "files", overwrite=True)
    with pytest.raises(
        InvalidArgument, match="out: lies in the dataset .*d; choose a folder outside"
    ):
        export(dataset, dataset / "out", "files")
    with pytest.raises(InvalidArgument, match="contains the source .*d; choose another folder"):
        export(dataset, tmp_path, "files")
    with shardio.open(dataset) as opened:
        with pytest.raises(InvalidArgument, match="subset: only for the path of a dataset"):
            export(opened, tmp_path / "new", "files", subset="a")
    assert entries(tmp_path) == ["d", "mine", "out"]


@pytest.mark.process
def test_kill_leaves_no_out(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(NewFolder, "publish", lambda *_, **__: os.kill(os.getpid(), 9))
        export(dataset, tmp_path / "out", "files")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 9
    assert not (tmp_path / "out").exists() and len(entries(tmp_path)) == 2
    export(dataset, tmp_path / "out", "files")
    assert entries(tmp_path) == ["d", "out"]


@pytest.mark.parametrize("then", ["goes on", "is gone"])
def test_an_export_being_replaced_exists_whenever_the_disk_fails(
    then: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export(dataset, out, "files", fields=["source"])
    old, n_calls = tree(out), 0
    while True:
        failing = FailingDisk(errno.EIO, n_calls, for_good=then == "is gone")
        with monkeypatch.context() as patch:
            failing.install(patch)
            with contextlib.suppress(OSError):
                export(dataset, out, "files", fields=["label"], overwrite=True)
        if failing.refused is None:
            break
        if tree(out) != old:  # the new one is whole; what failed is to make that last, or to tidy
            assert table(out)[0].keys() == {"label"}
            export(dataset, out, "files", fields=["source"], overwrite=True)
        n_calls += 1
    assert n_calls > 10
    assert entries(tmp_path) == ["d", "out"]


def test_replaced_in_a_step(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(dataset, tmp_path / "out", "files")
    before = tree(tmp_path)
    monkeypatch.setattr(fs, "_RENAMEAT2", None)
    with pytest.raises(UnsupportedEnvironment, match="in one step; remove the folder first"):
        export(dataset, tmp_path / "out", "files", overwrite=True)
    assert tree(tmp_path) == before


def test_extra_is_named(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("no", name="pyarrow")

    monkeypatch.setattr(api, "import_module", missing)
    with pytest.raises(UnsupportedEnvironment, match=r"\.\[arrow\]"):
        export(dataset, tmp_path / "out", "parquet")


def test_subsets_and_selections_are_exported_in_their_order(dataset: Path, tmp_path: Path) -> None:
    split(dataset, {"train": 0.5, "val": 0.5})
    export(dataset, tmp_path / "val", "files", subset="val")
    with shardio.open(dataset, subset="val") as val:
        known = [sample["source"] for sample in val]
    assert [line["source"] for line in table(tmp_path / "val")] == known
    with shardio.open(dataset) as every, every.select([7, 0, 7]) as some:
        export(some, tmp_path / "some", "files", fields="source")
    sources = [line["source"] for line in table(tmp_path / "some")]
    assert sources == ["clip 7", "clip 0", "clip 7"]


def test_files_stay_in_their_folder_and_have_distinct_names(tmp_path: Path) -> None:
    odd = ["../../etc/a.txt", "/etc/a.txt", "a\0b/..", "\u00fc" * 300]
    odd += ["", ".", "x/a.txt", "x/A.txt"]
    schema = Schema({"b": Bytes(), "source": Text(), "label": Array("int64")})
    classes = ["../up", "samples.jsonl", "", "UP"]
    with shardio.DatasetWriter(tmp_path / "d", schema, classes=classes) as writer:
        for i, name in enumerate(odd):
            writer.append({"b": bytes([i]), "source": name, "label": i % 4})
    for out, fields in ((tmp_path / "a", None), (tmp_path / "b", ["b", "source"])):
        export(tmp_path / "d", out, "files", fields=fields)
        rows = table(out)
        assert [(out / row["b"]).read_bytes() for row in rows] == [bytes([i]) for i in range(8)]
        assert all((out / row["b"]).resolve().is_relative_to(out) for row in rows)
    assert entries(tmp_path) == ["a", "b", "d"]


def test_names_are_made_safe() -> None:
    assert safe_path("../a/./b\\c:d/.e/") == "a/b_c_d/x.e"
    assert safe_path("/".join("0123456789")) == "2/3/4/5/6/7/8/9"
    assert [*map(safe_part, ["", "..", "_x", "a. ", "\n"])] == ["x", "x", "x_x", "a", "x_"]
    assert distinct_names(["A", "a", "t"], "t") == {"A": "A", "a": "a-2", "t": "t-2"}


def test_command_reports_written_skipped(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "out")
    assert cli.main(["export", str(dataset), out, "--format", "files"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("exported 12 samples to 3 files, ")
    assert "exporting: 100%" in output.err
    assert cli.main(["export", str(dataset), out, "--format", "files"]) == 2
    damage(dataset)
    more = [out, "--format", "files", "--overwrite", "--fields", "source"]
    assert cli.main(["export", str(dataset), *more]) == 1
    assert "--on-error skip" in capsys.readouterr().err
    assert cli.main(["export", str(dataset), *more, "--on-error", "skip"]) == 1
    assert "\n  sample 4  " in capsys.readouterr().out
    assert cli.main(["export", str(dataset), *more, "--on-error", "skip", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["n_samples"], report["skipped"][0]["sample"]) == (11, 4)
    assert cli.main(["export", str(dataset), *more, "--on-error", "skip", "--quiet"]) == 1
    assert "sample 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (OSError(errno.ENOSPC, "no room"), 3, "no room")],
)
@pytest.mark.parametrize("format", FORMATS)
def test_a_command_that_is_interrupted_or_out_of_room_leaves_nothing(
    format: str,
    error: BaseException,
    code: int,
    message: str,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    real, n_writes = fs.perform, 0

    def perform(call: str, path: str, act: Any, *given: Any, **named: Any) -> Any:
        nonlocal n_writes
        n_writes += call == "write"
        if call == "write" and n_writes == 1:
            raise error
        return real(call, path, act, *given, **named)

    monkeypatch.setattr(fs, "perform", perform)
    out = str(tmp_path / "out")
    assert cli.main(["export", str(dataset), out, "--format", format, "--quiet"]) == code
    assert message in capsys.readouterr().err
    assert entries(tmp_path) == ["d"]
