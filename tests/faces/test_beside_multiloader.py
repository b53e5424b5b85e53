"""Ours and webdataset's MultiLoader give the same samples, each worker's in the same order."""

from __future__ import annotations

import ast
import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.faces.multi_datasets import NEEDS_ZEROMQ

pytestmark = [
    pytest.mark.external,
    NEEDS_ZEROMQ,
    pytest.mark.skipif(
        importlib.util.find_spec("webdataset") is None,
        reason="webdataset's own is in the extra `peers`: pip install '.[peers]'",
    ),
]

PROGRAM = """
import os, pickle, sys
import webdataset, webdataset.multi, zmq
import shardio

class Places:
    def __iter__(self):
        for number in range(20):
            yield os.environ["WORKER"], os.environ["NUM_WORKERS"], number

def reader(dataset, sockname, index, num_workers):
    # Theirs ends before what it has sent is written.
    os.environ["WORKER"], os.environ["NUM_WORKERS"] = str(index), str(num_workers)
    context = zmq.Context()
    with context.socket(zmq.PUSH) as socket:
        socket.connect(sockname)
        for sample in dataset:
            socket.send(pickle.dumps(sample))
        socket.send(pickle.dumps(webdataset.multi.EOF(index=index)))
    context.term()

webdataset.multi.reader = reader
kind = shardio.MultiLoader if sys.argv[1] == "ours" else webdataset.multi.MultiLoader
tars = webdataset.WebDataset(sorted(sys.argv[2:]), shardshuffle=False)
places = list(kind(Places(), 3))
samples = [(s["__key__"], s["txt"]) for s in kind(tars, 2)]
print("found", [sorted(places), [p for p in places if p[0] == "1"], sorted(samples)])
"""


def _found(whose: str, tars: list[str]) -> object:
    command = [sys.executable, "-c", PROGRAM, whose, *tars]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.partition("found ")[2].splitlines()[0])


def test_both_give_the_same_of_a_dataset_and_of_webdataset_s_tar_files(tmp_path: Path) -> None:
    tars = [str(tmp_path / f"{number}.tar") for number in range(4)]
    for path in tars:
        with tarfile.open(path, "w") as tar:
            for number in range(3):
                text = f"{Path(path).stem} {number}".encode()
                info = tarfile.TarInfo(f"{Path(path).stem}-{number}.txt")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
    ours, theirs = _found("ours", tars), _found("theirs", tars)
    assert ours == theirs
    assert len(ours[2]) == 12  # type: ignore[index]  # each worker read its own files
