"""The examples of tinyloader's own page run line by line, after a preamble.

The preamble: imports, `load_video`, files of these names, and `loader`, where the page calls the
same thing `video_loader`. In the imports only the module changes.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardio.items import Loader, SharedMemoryShim, load, load_with_workers

PREAMBLE = """
import typing

import numpy as np
import tinygrad

def load_video(path):
    n = int(pathlib.Path(path).stem)
    return np.full((4, 8, 8, 3), n, np.uint8), np.array([n], np.int64)

seen = []
"""

DEFINITION = """
import pathlib

import numpy as np
from shardio.items import Loader

class VideoLoader(Loader):
    def make_request(self, item: pathlib.Path) -> typing.Any:
        return item

    def load(self, request: pathlib.Path) -> tuple[np.typing.NDArray, ...]:
        x, y = load_video(request)
        return x, y

    def post_process(
        self, response: tuple[np.typing.NDArray, ...]
    ) -> tuple[tinygrad.Tensor, ...]:
        x, y = response
        return tinygrad.Tensor(x).contiguous().realize(), tinygrad.Tensor(
            y
        ).contiguous().realize()

loader = VideoLoader()
"""

USES = {
    "load": """
from shardio.items import load

video_loader = VideoLoader()
for x, y in load(loader=loader, items=["0.mp4", "1.mp4", "2.mp4"]):
    seen.append((x, y))
""",
    "load_with_workers": """
from shardio.items import load_with_workers

video_loader = VideoLoader()
for x, y in load_with_workers(loader=loader, items=["0.mp4", "1.mp4", "2.mp4"], num_worker=8):
    seen.append((x, y))
""",
    "SharedMemoryShim": """
from multiprocessing.managers import SharedMemoryManager
from shardio.items import load_with_workers
from shardio.items import SharedMemoryShim

num_workers = 8

with SharedMemoryManager() as smm:
    loader = SharedMemoryShim(
        VideoLoader(),
        smm=smm,
        memory_pool_block_count=num_workers,
    )
    with load_with_workers(loader, ["0.mp4", "1.mp4", "2.mp4"], num_workers) as generator:
        for x, y in generator:
            seen.append((x, y))
""",
}

CHECK = """
for n, (x, y) in enumerate(seen):
    assert isinstance(x, tinygrad.Tensor) and x.shape == (4, 8, 8, 3), x
    assert (x.numpy() == n).all() and y.numpy().tolist() == [n], (n, x.numpy(), y.numpy())
assert len(seen) == 3, len(seen)
"""


DOCUMENTED: dict[Any, str] = {
    Loader.make_request: "self, item",
    Loader.load: "self, request",
    Loader.post_process: "self, response",
    Loader.shutdown: "self",
    load: "loader, items",
    load_with_workers: "loader, items, num_worker=None, shared_memory_enabled=False, "
    "memory_pool_block_count=None",
    SharedMemoryShim: "loader, smm, memory_pool_block_count",
}


@pytest.mark.parametrize("callable_", DOCUMENTED, ids=lambda each: each.__qualname__)
def test_its_parameters_are_those_of_the_page_and_of_0_1_5(callable_: Any) -> None:
    found = inspect.signature(callable_).parameters.values()
    documented = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in documented]
    assert ", ".join(named) == DOCUMENTED[callable_]
    assert {p.kind for p in found if p not in documented} <= {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.cpu_device
@pytest.mark.parametrize("use", sorted(USES))
def test_an_example_of_the_page_runs_with_one_import_changed(use: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"  # it has no import guard, as on the page
    program.write_text(PREAMBLE + DEFINITION + USES[use] + CHECK)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
