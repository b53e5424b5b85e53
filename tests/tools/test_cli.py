"""The command as a whole: exit codes, one line per error, silence where it was asked for."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.errors import (
    ChecksumMismatch,
    ClosedError,
    DatasetConflict,
    DatasetCorrupt,
    DatasetExists,
    DatasetNotFound,
    InsufficientMemory,
    SchemaError,
    ShardNotFound,
    TransformError,
    UnsupportedEnvironment,
)
from shardio_tools import cli, entry
from shardio_tools.arguments import parse_bytes
from tests.shards import write_shard

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(cli.COMMANDS)


def run_in_shell(
    redirections: str, *arguments: object, before: Sequence[str] = ("-m", "shardio")
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end with its streams as a shell redirects them."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/converters:{ROOT}/tools"}
    command = ["sh", "-c", f'"$@" {redirections}', "sh", sys.executable, *before]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_apart(*arguments: str, before: Sequence[str] = ("-m", "shardio")) -> subprocess.Popen[str]:
    """Start the command in a process of its own, with pipes for its output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/converters:{ROOT}/tools"}
    command = [sys.executable, *before, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def raising(error: BaseException) -> Any:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (shardio.ShardCorrupt("bad", code="padding"), 1),
        (ChecksumMismatch("bad", code="checksum"), 1),
        (DatasetCorrupt("bad"), 1),
        (shardio.MediaError("bad"), 1),
        (TransformError("bad"), 1),
        (ShardNotFound("bad"), 2),
        (DatasetNotFound("bad"), 2),
        (DatasetExists("bad"), 2),
        (DatasetConflict("bad"), 2),
        (shardio.InvalidArgument("bad"), 2),
        (SchemaError("bad"), 2),
        (InsufficientMemory("bad"), 3),
        (UnsupportedEnvironment("bad"), 3),
        (shardio.WorkerDied("bad"), 3),
        (OSError(28, "bad", "out/x"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_an_error_becomes_one_line_and_its_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(cli.COMMANDS["verify"], "run", raising(error))
    assert cli.main(["verify", "x"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shardio: ") and err.count("\n") == 1
    assert "interrupted" in err if code == 130 else "bad" in err


@pytest.mark.parametrize("error", [TypeError("a bug"), ClosedError("a bug")])
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.COMMANDS["verify"], "run", raising(error))
    with pytest.raises(type(error), match="a bug"):
        cli.main(["verify", "x"])


def test_control_characters_in_a_name_are_escaped(capsys: Capture) -> None:
    assert cli.main(["inspect", "no\x1b[2Jsuch\nshardio: file"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err and err.count("\n") == 1
    assert r"no\x1b[2Jsuch\nshardio: file: there is no such" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_itself(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    summary = (cli.COMMANDS[command].__doc__ or "").splitlines()[0]
    assert summary in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["verify"], ["convert", "a"], ["convert", "a", "b", "--size=x"]]
)
def test_arguments_that_do_not_parse_end_with_code_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: shardio" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["convrt"], "; did you mean convert?"),
        (["--verison"], "; did you mean --version?\n"),
        (["convert", "a", "b", "--deal"], "unrecognized arguments: --deal\n"),
        (["verify", "x", "--wrkers=2"], "arguments: --wrkers=2; did you mean --workers?"),
        (["verify", "x", "y"], "shardio verify: error: unrecognized arguments: y\n"),
        (["convert", "a", "b", "--franes", "8"], "; did you mean --frames?"),
        (["export", "a", "b", "--format", "parket"], "; did you mean parquet?"),
    ],
)
def test_typos_get_a_suggestion(arguments: list[str], hint: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert hint in capsys.readouterr().err


def test_the_command_line_loads_neither_av_nor_tinygrad_nor_rich_to_say_what_it_can() -> None:
    code = (
        "import sys, shardio_tools.cli as cli; cli.parser()\n"
        "sys.exit(str({'av', 'tinygrad', 'rich'} & set(sys.modules)))"
    )
    assert run_in_shell("", before=("-c", code)).stderr.strip() == "set()"


def test_a_reader_of_the_output_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.shard", 3)
    with run_apart("inspect", str(shard), "--json") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == cli.BROKEN_PIPE


def test_ctrl_c_ends_a_command_with_one_line() -> None:
    code = (
        "import signal, sys, shardio_tools.cli as cli\n"
        "def run(options): print('ready', flush=True); signal.pause()\n"
        "cli.COMMANDS['verify'].run = run\n"
        "sys.exit(cli.main(['verify', 'x']))"
    )
    with run_apart("-c", code, before=()) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "shardio: verify: interrupted\n"
    assert process.returncode == cli.INTERRUPTED


LOADING = """
import os, signal, sys
import shardio_tools.entry

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv[1:] = ["verify", "no such"]
sys.meta_path.insert(0, Interrupting())
sys.exit(shardio_tools.entry.main())
"""
"""The command gets Ctrl-C while it imports NumPy."""


@pytest.mark.parametrize(
    ("state", "code", "err"),
    [("heard", -signal.SIGINT, ""), ("ignored", 2, "shardio: no such: there is no such")],
)
def test_ctrl_c_during_imports_is_silent(state: str, code: int, err: str) -> None:
    with run_apart("-c", LOADING, state, before=()) as process:
        out, found = process.communicate(timeout=120)
    assert out == "" and found.startswith(err) and bool(found) == bool(err)
    assert process.returncode == code


def test_ctrl_c_is_heard_again_by_a_command_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*, on_loaded: Callable[[], object]) -> int:
        on_loaded()
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("nobody heard it")

    monkeypatch.setattr(cli, "main", interrupted)
    assert entry.main() == cli.INTERRUPTED


def test_a_pipe_is_refused_without_waiting(tmp_path: Path, capsys: Capture) -> None:
    pipe = tmp_path / "a.shard"
    os.mkfifo(pipe)
    for command in ("inspect", "verify"):
        assert cli.main([command, str(pipe)]) == 2
        assert capsys.readouterr().err == f"shardio: {pipe}: neither a file nor a folder\n"


# Runs the command with each of these arguments in a fork of what has it loaded, and writes the exit
# codes to descriptor 3.
ONE_AFTER_THE_OTHER = """
import gc, json, os, runpy, sys
import numpy.ma, rich.cells, shardio, shardio_tools.bench, shardio_tools.cli, shardio_tools.convert
shardio.open, shardio.ShardReader
for command in ("diff", "inspect", "stats", "verify"):
    shardio_tools.cli.COMMANDS[command]
gc.collect()
gc.freeze()  # or each fork would copy all that it frees at its end
codes = []
for arguments in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        sys.argv[1:] = arguments
        runpy.run_module("shardio", run_name="__main__")
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.write(3, json.dumps(codes).encode())  # after whatever the commands said
"""


def run_one_after_the_other(
    streams: str, given: Sequence[Sequence[str]]
) -> tuple[list[int], subprocess.CompletedProcess[str]]:
    """Run some commands with their streams as a shell redirects them; returns the exit codes."""
    before = ("-c", ONE_AFTER_THE_OTHER)
    done = run_in_shell(f"3>&1 {streams}", json.dumps(given), before=before)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_streams_and_full_errors_change_no_exit_code(streams: str, dataset: Path) -> None:
    kinds = (["inspect"], ["inspect", "--json"], ["verify"])
    given = [[*kind, str(path)] for path in (dataset, dataset / "no") for kind in kinds]
    codes, _ = run_one_after_the_other(streams, [*given, ["--version"], ["no such command"]])
    assert codes == 3 * [cli.OK] + 3 * [cli.USAGE] + [cli.OK, cli.USAGE]


LOST = "shardio: standard output: No space left on device; the report is incomplete\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("errors", ["", " 2>/dev/full"])
def test_a_report_that_could_not_be_written_is_an_error(
    errors: str, unbuffered: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    copy, bad = tmp_path / "copy", tmp_path / "bad"
    for place in (copy, bad):
        shutil.copytree(dataset, place)
    with open(bad / "000000-000.shard", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")
    kinds = (["inspect"], ["verify"], ["stats"], ["diff", str(copy)])
    given = [[*kind, str(copy), *last] for kind in kinds for last in ([], ["--json"])]
    given += [["verify", str(bad)], ["--help"], ["--version"], ["stats", "--help"]]
    silent = [["verify", "--quiet", str(copy)], ["verify", "--quiet", str(bad)], ["inspect", "no"]]
    codes, done = run_one_after_the_other(f">/dev/full{errors}", [*given, *silent])
    assert codes == len(given) * [cli.ENVIRONMENT] + [cli.OK, cli.BAD_DATA, cli.USAGE]
    assert done.stderr.count(LOST) == (0 if errors else len(given))


def test_what_is_opened_later_does_not_get_the_number_of_a_closed_stream() -> None:
    code = (
        "import os, shardio_tools.cli as cli\n"
        "def run(options):\n"
        "    os._exit(100 + os.open('/dev/null', os.O_RDONLY))\n"
        "cli.COMMANDS['verify'].run = run\n"
        "cli.main(['verify', 'x'])"
    )
    assert run_in_shell("<&- >&- 2>&-", before=("-c", code)).returncode == 103


def test_a_reader_of_the_errors_that_leaves_early_is_told_by_the_exit_code(dataset: Path) -> None:
    with run_apart("verify", str(dataset)) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stderr.close()
        process.stdout.read()
    assert process.returncode == cli.BROKEN_PIPE


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("name", ["dataset.json", "generations/000001.json"])
def test_a_manifest_that_is_a_pipe_is_bad_data_and_not_waited_for(
    command: str, name: str, dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert cli.main([command, str(copy)]) == 1
    assert f"{copy / name}: is a folder, pipe or device" in capsys.readouterr().out


UP = os.path.dirname(os.getcwd())


@pytest.mark.parametrize(
    ("arguments", "code", "file", "said"),
    [
        (["convert", "src", "out"], errno.ENOSPC, (), "out: No space left on device"),
        (["convert", "src", "out"], errno.EMFILE, (), "convert: Too many open files"),
        (["verify", "path"], errno.EIO, (), "path: Input/output error"),
        (["verify", "path"], errno.ENOSPC, ("out/x",), "out/x: No space left on device"),
        # Paths are spelt as on the command line
        (["verify", "../a/"], errno.EROFS, (f"{UP}/a/b",), "../a/b: Read-only file system"),
        (["reshard", "a", "../b/c"], errno.EROFS, (f"{UP}/b",), "../b: Read-only file system"),
        (["reshard", "a", "c"], errno.EROFS, (os.getcwd(),), ".: Read-only file system"),
        (["reshard", "a", "c"], errno.EROFS, ("/x/y",), "/x/y: Read-only file system"),
    ],
)
def test_an_error_of_the_system_is_said_with_the_file_or_what_is_known(
    arguments: list[str],
    code: int,
    file: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    error = OSError(code, os.strerror(code), *file)
    monkeypatch.setattr(cli.COMMANDS[arguments[0]], "run", raising(error))
    assert cli.main(arguments) == cli.ENVIRONMENT
    assert capsys.readouterr().err == f"shardio: {said}\n"


def test_a_kind_that_cannot_be_imported_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    error = UnsupportedEnvironment("the converter 'x' cannot be imported")
    monkeypatch.setattr("shardio_tools.converter_options.converter_classes", raising(error))
    with pytest.raises(SystemExit) as end:
        cli.main(["convert", "src", "out"])
    assert end.value.code == cli.ENVIRONMENT
    assert capsys.readouterr().err == "shardio: the converter 'x' cannot be imported\n"


def test_a_misspelt_folder_is_answered_with_the_name_beside_it(
    dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    typo = tmp_path / "datset"
    (tmp_path / "dataset").symlink_to(dataset)
    for command in (["inspect", typo], ["bench", typo], ["convert", typo, tmp_path / "out"]):
        assert cli.main([*map(str, command)]) == cli.USAGE
        err = capsys.readouterr().err
        assert err.startswith(f"shardio: {typo}: ") and "; did you mean " in err
        assert err.rstrip("?'\n").endswith("dataset")


def test_errors_name_the_flags_and_not_the_options_of_python(
    dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "table.csv").write_text("a\n1\n")
    assert cli.main(["convert", str(tmp_path / "table.csv"), str(dataset)]) == cli.USAGE
    assert capsys.readouterr().err.endswith(
        f"{dataset}: already holds a dataset; --overwrite replaces it, --append adds to it; "
        "or choose another folder\n"
    )


def test_a_command_imports_no_other_command() -> None:
    code = (
        "import sys, shardio_tools.cli as cli\n"
        "sys.exit(cli.main(['verify', 'no such']) != cli.USAGE or\n"
        "    any(f'shardio_tools.{name}' in sys.modules for name in ('convert', 'bench', 'demo')))"
    )
    with run_apart("-c", code, before=()) as process:
        assert process.wait() == 0


HABITS = {
    "convert pics out --force": "unrecognized arguments: --force; write --overwrite",
    "convert pics out -f": "unrecognized arguments: -f; write --overwrite",
    "export out tars --format files --force": "--force; write --overwrite",
    "convert pics out -j 4": "-j 4; write --workers",
    "convert pics -o out": "-o; OUT is an argument without an option",
    "convert pics --output=out": "--output=out; OUT is an argument without an option",
    "convert pics out --shard-size 100MB": "; write --shard-bytes",
    "convert pics out --val 0.1": "--val 0.1; write --split train=0.9,val=0.1",
    "view out --subset val": "--subset val; open the subset in the page: its filters",
    "inspect out -n 3": "-n 3; write --sample N for one sample, or --sheet FILE",
    "convert pics out --dry-run": "; there is no dry run: convert a few files first",
    "convert pics out --compression zstd": "; media are compressed already",
    "convert pics out --size 64x48": "pictures become squares, so write one number, 64",
    "convert pics out --shard-bytes many": "expected bytes, such as 100MB or 64MiB; found 'many'",
    "export out tars --format folder": "invalid choice: 'folder'",
    "export out tars --format wds": "; did you mean webdataset?",
    "convert https://a.org/a.tar out": "copy the files first, for example with `curl -O`",
    "convert hf://datasets/a out": "for example with `hf download --repo-type dataset",
    "convert pics out -w 4": "-w 4; write --workers",
    "convert pics out -q": "-q; write --quiet",
    "-V": "-V; write --version",
    "convert pics out --type images": "--type images; write --kind",
    "convert pics out --format jpeg": "--format jpeg; write --store",
    "convert pics out --limit 3": "there is no limit: convert a few files first",
    "convert pics out --classes a,b": "classes are the names of folders, or those of --labels FILE",
    "convert pics out --seed 3": "write --split-seed for --split; a ShardLoader shuffles: shuffle=",
    "convert pics out --shuffle": "the order is that of the names; a ShardLoader shuffles: ",
    "convert a.jpg b.jpg out": "convert takes one SRC: a folder, or a pattern in quotes; or",
    "inspect out --head 3": "--head 3; write --sample N for one sample",
    "export out tars wds": "--format; write --format webdataset",
    "export out tars csv": "required: --format",
    "compare out out": "unknown command 'compare'; did you mean diff?",
    "rm out": "unknown command 'rm'; a dataset is a folder, which rm -r removes",
    "bench out -o trace": "unrecognized arguments: -o trace",
}


@pytest.mark.parametrize("line", HABITS)
def test_habits_of_other_programs_are_answered(line: str, capsys: Capture) -> None:
    with contextlib.suppress(SystemExit):
        assert cli.main(line.split()) == cli.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert HABITS[line] in said


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("4096", 4096), ("64M", 64 << 20), ("1.5GiB", 3 << 29), ("100MB", 10**8), ("2 kb", 2000)],
)
def test_sizes_in_bytes_may_have_units(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


def test_outputs_in_the_source_and_datasets_as_the_source_are_named(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "a.npy", np.zeros(3))
    source, out = str(tmp_path), str(tmp_path / "out")
    assert cli.main(["convert", source, out, "--workers=0"]) == 0
    assert "OUT lies in SRC, where other programs" in capsys.readouterr().out
    assert cli.main(["convert", out, str(tmp_path / "new")]) == cli.USAGE
    said = capsys.readouterr().err
    assert "this is a dataset already" in said and "kinds:" not in said
