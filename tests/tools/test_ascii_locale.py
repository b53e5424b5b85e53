"""Names of files and names in data are the same in an ASCII locale as in UTF-8."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import shardio
from shardio.conversion.inputs import original_name, stored_name, utf8_name
from shardio.measuring import measure_stored
from tests.ascii_locale import LATIN, Ran, run_commands, run_python
from tests.media_made import scene, write_video

pytestmark = pytest.mark.slow  # that is, the fixture `ran`

CONVERT = ("--workers", "0", "--frames", "4", "--size", "16")
COMMANDS: dict[str, tuple[str | bytes, ...]] = {
    "videos": ("convert", "clips", "vidéo", *CONVERT),
    "pattern": ("convert", "clips/kla?", "pattern", *CONVERT),
    "bytes": ("convert", b"clips/" + LATIN, LATIN, *CONVERT),
    "missing": ("convert", "nirgendwö", "out"),
    "json": ("inspect", "vidéo", "--json"),
    "diff-json": ("diff", "vidéo", LATIN, "--json"),
    "tables": ("convert", "tables", "täb", "--workers", "0", "--reference", "größe"),
    "inspect": ("inspect", "täb"),
    "verify": ("verify", "täb"),
    "add-column": ("add-column", "täb", "länge", "--function", "fn.py:maß", "--field", "int64"),
    "split": ("split", "täb", "--parts", "groß=0.5,rest=0.5", "--group", "länge"),
    "stats": ("stats", "täb", "--subset", "groß", "--json"),
    "bench": ("bench", "täb", "--seconds", "0.01", "--workers", "0", "--fields", "länge"),
    "diff": ("diff", "täb", "vidéo"),
    "files": ("export", "täb", "filés", "--format", "files"),
    "sheet": ("inspect", "vidéo", "--sheet", "bögen.png"),
}
CODES = {"missing": 2, "diff": 1, "diff-json": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make videos of two classes, one of them not UTF-8, and a table that names files."""
    root = tmp_path_factory.mktemp("ascii")
    clips, tables = root / "clips", root / "tables" / "ä"
    (clips / "klaß").mkdir(parents=True)
    write_video(clips / "klaß" / "größe.mp4", scene(5))
    shutil.copy(clips / "klaß" / "größe.mp4", os.path.join(clips, "klaß", "\udcff.mp4"))
    shutil.copytree(clips / "klaß", os.path.join(clips, os.fsdecode(LATIN)))
    tables.mkdir(parents=True)
    for name, text in ("ß", "straße"), ("é", "weg"):
        (tables / f"{name}.txt").write_text(text, "utf-8")
    lines = "".join(f"{name}\n" for name in ("größe", "ß.txt", "é.txt"))
    (tables / "t.csv").write_text(lines, "utf-8")
    (root / "fn.py").write_text("def maß(sample):\n    return len(sample['größe'])\n", "utf-8")
    return root


@pytest.fixture(scope="module")
def ran(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    found = run_commands([*COMMANDS.values()], folder, tmp_path_factory.mktemp("outputs"))
    return dict(zip(COMMANDS, found, strict=True))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_as_in_utf_8(name: str, ran: dict[str, Ran]) -> None:
    assert "Traceback" not in ran[name].err
    assert ran[name].code == CODES.get(name, 0), ran[name]


def test_a_conversion_says_what_it_has_done(ran: dict[str, Ran], folder: Path) -> None:
    assert r"kla\xdf" in ran["videos"].out and "PSNR" in ran["videos"].out
    assert ran["videos"].out.splitlines()[-1].startswith("converted 4 of 4 files into 4 videos")
    assert ran["videos"].out.endswith(": vid\\xe9o\n")
    assert "not measured" not in ran["videos"].err
    with shardio.open(folder / "vidéo") as dataset:
        assert dataset.classes == ("klaß", r"lat\xe9")


def test_one_character_of_a_pattern_is_one_of_a_name(ran: dict[str, Ran], folder: Path) -> None:
    with shardio.open(folder / "pattern") as dataset:
        assert dataset.classes == ("klaß",)


def test_errors_name_files_as_far_as_the_encoding_goes(ran: dict[str, Ran]) -> None:
    assert ran["missing"].err.startswith(r"shardio: nirgendw\xf6: no such file")


def test_paths_in_json_are_the_names_of_files(ran: dict[str, Ran]) -> None:
    found = json.loads(ran["diff-json"].out)
    assert (found["a"], found["b"]) == ("vidéo", os.fsdecode(LATIN))
    assert "klaß" in json.loads(ran["json"].out)["classes"]


def test_names_in_arguments_are_those_in_data(ran: dict[str, Ran], folder: Path) -> None:
    with shardio.open(folder / "täb") as dataset:
        assert {"größe", "länge"} <= dataset.schema.keys()
        assert {*dataset.subsets} == {"groß", "rest"}
        assert bytes(dataset[0]["größe"]).decode() == "straße"


def test_exported_files_have_names_in_utf_8(ran: dict[str, Ran], folder: Path) -> None:
    assert (folder / "bögen.png").stat().st_size
    table = (folder / "filés" / "samples.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["länge"] for line in table] == [7, 3]
    texts = [(folder / "filés" / json.loads(line)["größe"]).read_text("utf-8") for line in table]
    assert texts == ["straße", "weg"]


UNENCODABLE = {
    "shardio.convert('klaß', 'out')": "src (SRC)",
    "shardio.convert('.', 'ß')": "out (OUT)",
    "shardio.convert('.', 'out', labels='ß.csv')": "labels (--labels)",
    "shardio.open('ß')": "path",
    "shardio.ShardLoader('ß', 1)": "path",
    "shardio.ShardReader('ß.shard')": "path",
}


def test_an_unencodable_path_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    call = "try:\n    {}\nexcept ValueError as error:\n    print(ascii(error))\n"
    code = "import shardio\n" + "".join(map(call.format, UNENCODABLE))
    done = run_python(code.encode("ascii", "backslashreplace").decode(), folder=tmp_path)
    for what, line in zip(UNENCODABLE.values(), done.stdout.splitlines(), strict=True):
        assert line.startswith(f'InvalidArgument("{what} is '.encode())
        assert b"ascii, cannot encode; set PYTHONUTF8=1" in line


@pytest.mark.parametrize(
    "raw", [b"a", b"a\\b", b"a\\xff", b"\xff", b"\\\xff\\", b"\\x5c\xe9", b"\\\\x"]
)
def test_a_stored_name_leads_back_to_its_file(raw: bytes) -> None:
    stored = stored_name(os.fsdecode(raw))
    assert stored.encode() is not None
    assert os.fsencode(original_name(stored)) == raw


def test_names_are_what_they_are_in_a_locale_of_utf_8() -> None:
    assert utf8_name("klaß") == "klaß" == original_name("klaß") == stored_name("klaß")


def test_measure_stored_accepts_names_beyond_utf_8(folder: Path, tmp_path: Path) -> None:
    source = os.path.join(folder, "clips", os.fsdecode(LATIN))
    report = shardio.convert(source, tmp_path / "out", workers=0, frames=4, size=16)
    found = measure_stored(report, source, seconds=0.01)
    assert found is not None and {*found.psnr_db} == {"größe.mp4", r"\xff.mp4"}
