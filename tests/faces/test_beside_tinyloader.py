"""The same program with tinyloader and with this: the same items, in the same order."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
import numpy as np
from {module} import Loader, SharedMemoryShim, load, load_with_workers

class Pairs(Loader):
    def make_request(self, item):
        self.here = os.getpid()
        return item + 1
    def load(self, request):
        return np.full(3, request), np.array([request * 2.5])
    def post_process(self, response):
        x, y = response
        return x.tolist(), y.tolist(), os.getpid() == self.here
    def shutdown(self):
        said.append("shutdown")

if __name__ == "__main__":
    said = []
    loader = Pairs()
    said.append(list(load(loader, range(5))))
    said.append(list(load(loader, items=(i for i in range(3)))))
    with load_with_workers(loader, range(40), 2) as generator:
        said.append(list(generator))
        said.append(list(generator))
    with load_with_workers(loader=loader, items=iter(range(3)), num_worker=1) as generator:
        said.append(next(generator))
        for pair in generator:
            said.append(pair)
    try:
        with load_with_workers(loader, range(9), num_worker=2) as generator:
            for pair in generator:
                raise KeyError("in the body")
    except KeyError as error:
        said.append(repr(error))
    print(json.dumps(said))
"""


def said_by(module: str, folder: Path) -> object:
    program = folder / f"{module}.py"
    program.write_text(PROGRAM.format(module=module))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.external
def test_a_program_says_the_same_with_either(tmp_path: Path) -> None:
    ours = said_by("shardio.items", tmp_path)
    expected = [[[i + 1] * 3, [(i + 1) * 2.5], True] for i in range(40)]
    lists = [expected[:5], expected[:3], expected, [], "shutdown", *expected[:3], "shutdown"]
    assert ours == [*lists, "shutdown", "KeyError('in the body')"]
    if find_spec("tinyloader") is None:
        pytest.skip("to run the original, too: pip install '.[peers]'")
    assert said_by("tinyloader.loader", tmp_path) == ours
