"""RLIMIT_FSIZE, which holds for memory files too: an error with limit and remedy.

A process passes its limit on to the programs it starts: each case runs in a program of its own.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Image, Input, Outcome, Schema
from shardio._workers.processes.blocks import Block
from shardio.media import encode_jpeg
from shardio_tools import cli
from tests.faults.scene import MARK
from tests.faults.stem import stem
from tests.limits import files_of_at_most
from tests.lines import Lines, contents, convert
from tests.loading import TWO_FIELDS, two_fields, write_dataset

LIMITED = """
import resource, sys
sys.argv[1:] = {arguments!r}
sys.path.insert(0, {site!r})
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""
LOAD = """
from shardio import ShardLoader
place, batch_size, num_workers = sys.argv[1], *map(int, sys.argv[2:])
with ShardLoader(place, batch_size, num_workers=num_workers, output="numpy") as loader:
    print(sum(len(batch["image"]) for batch in loader))
"""
COMMAND = """
from shardio.conversion import journal
from shardio_tools import cli
journal.MIN_UNIT_BYTES, journal.MIN_INPUT_BYTES = 8, 0
raise SystemExit(cli.main(sys.argv[1:]))
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return a function that runs a program in which no file may exceed n_bytes."""
    # An interpreter that meets the limit would leave truncated bytecode for all later ones.
    env = {**os.environ, MARK: "0" * 32, "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with stem(MARK, "shardio_tools.cli", "shardio.conversion.api") as grown:

        def run(code: str, n_bytes: int, *arguments: object, site: object = "") -> Any:
            given = {"limit": n_bytes, "arguments": [*map(str, arguments)], "site": str(site)}
            command = [sys.executable, "-c", LIMITED.format(**given) + code]
            with grown.popen(command, **pipes, text=True, env=env) as program:
                said = program.communicate(timeout=120)
            return subprocess.CompletedProcess(command, program.returncode, *said)

        yield run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("limited") / "set"
    return write_dataset(folder, 128, 2, TWO_FIELDS, two_fields(128))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_loader_that_needs_less_than_the_limit_works(
    run: Run, place: str, num_workers: int
) -> None:
    assert run(LOAD, 4 << 20, place, 128, num_workers).stdout == "128\n"


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("n_bytes", [0, 1 << 13, 600 << 10])
def test_a_loader_says_what_it_needs(run: Run, place: str, num_workers: int, n_bytes: int) -> None:
    done = run(LOAD, n_bytes, place, 128, num_workers)
    found = re.search(
        rf"InsufficientMemory: .*: a memory file of (\d+) bytes is needed, and RLIMIT_FSIZE allows "
        rf"{n_bytes}: raise that limit \(`ulimit -f unlimited`\)$",
        done.stderr,
        re.MULTILINE,
    )
    assert found is not None, done.stderr
    assert int(found[1]) > n_bytes
    if n_bytes == 600 << 10:
        assert "InsufficientMemory: a block: " in done.stderr


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_outgrows_the_limit_is_an_error(
    run: Run, tmp_path: Path, num_workers: int
) -> None:
    schema = Schema({"image": Image()})
    sizes = [16] * 31 + [1200]
    samples = ({"image": encode_jpeg(np.zeros((n, n, 3), np.uint8))} for n in sizes)
    place = write_dataset(tmp_path / "set", 32, 1, schema, samples)
    done = run(LOAD, 3 << 20, place, 1, num_workers)
    assert re.search(
        r"InsufficientMemory: .* memory file of \d{7} bytes .* allows 3145728: ", done.stderr
    )
    assert run(LOAD, 64 << 20, place, 1, num_workers).stdout == "32\n"


def test_a_block_grows_as_far_as_the_limit_allows() -> None:
    with files_of_at_most(1 << 20):
        block = Block(0, 64 << 10)
        block.grow(128 << 10, preferred=4 << 20)
        assert len(block.bytes) == 1 << 20
    os.close(block.fd)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("n_bytes", [100, 8 << 10, 20 << 10])
def test_a_conversion(run: Run, lines: Path, tmp_path: Path, n_bytes: int, workers: int) -> None:
    convert(lines, tmp_path / "whole")
    out = tmp_path / "out"
    command = ["convert", lines, out, "--kind=lines", f"--workers={workers}"]
    done = run(COMMAND, n_bytes, *command, site=tmp_path / "site")
    assert done.returncode == cli.ENVIRONMENT, done.stderr
    # A worker needs a block of shared memory before it writes a shard.
    place = rf"{out}: File too large:|a block: a memory file of \d+ bytes is needed, and"
    found = re.search(
        rf"^shardio: ({place}) RLIMIT_FSIZE allows {n_bytes}: raise that limit "
        r"\(`ulimit -f unlimited`\)$",
        done.stderr,
        re.MULTILINE,
    )
    assert found is not None, done.stderr
    assert ("a block" in found[1]) == (workers > 0 and n_bytes > 100)
    assert "Traceback" not in done.stderr
    assert not out.exists() or [path.name for path in out.iterdir()] == [".conversion"]
    assert cli.main([*map(str, command), "--resume"]) == cli.OK
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("command", ["merge", "reshard", "repair", "stats", "export"])
def test_a_command_that_writes_leaves_the_dataset_as_it_was(
    run: Run, tmp_path: Path, command: str
) -> None:
    source, out = tmp_path / "set", tmp_path / "out"
    write_dataset(source, 128, 2, TWO_FIELDS, two_fields(128))
    if command == "repair":  # the last page is restored from the first
        shard = next(source.glob("*.shard"))
        shard.write_bytes(shard.read_bytes()[:-4096] + bytes(4096))
    arguments = {
        "merge": ["merge", source, out],
        "reshard": ["reshard", source, out],
        "repair": ["repair", source, out],
        "stats": ["stats", source],
        "export": ["export", source, out, "--format=webdataset"],
    }[command]
    before = contents(source)
    done = run(COMMAND, 256, *arguments)
    assert done.returncode == cli.ENVIRONMENT, done.stderr
    assert re.search(
        r"^shardio: \S+: File too large: RLIMIT_FSIZE allows 256: raise that limit",
        done.stderr,
        re.MULTILINE,
    )
    assert contents(source) == before
    assert cli.main([*map(str, arguments)]) == cli.OK  # without the limit


def test_limits_met_by_a_converter_end_it(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_much(self: Lines, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        yield from ()
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(Lines, "samples", write_much)
    with pytest.raises(OSError, match="File too large"):
        convert(lines, tmp_path / "out", on_error="skip")
