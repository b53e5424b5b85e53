"""A fork of the stem is a program as any other."""

from __future__ import annotations

import os
from pathlib import Path

from tests.faults.scene import MARK, PATIENCE_S, line, scene
from tests.faults.stem import stem

PROGRAM = """
import os, sys
print(os.getppid(), os.getsid(0) == os.getpid(), os.getcwd(), sys.argv, __name__, flush=True)
print(sys.stdin.read())
sys.exit("complaint")
"""


def test_it_is_a_child_with_session_folder_streams_and_mark_of_its_own(tmp_path: Path) -> None:
    with stem(MARK) as grown, scene(grown.popen) as stage, scene(grown.popen) as other:
        main = stage.start(["-c", PROGRAM], stdin=None, cwd=tmp_path)
        assert line(main) == f"{os.getpid()} True {tmp_path} ['-c'] __main__"
        assert [*stage.processes()] == [main.pid] and other.processes() == {}
        assert main.communicate(b"said", PATIENCE_S) == (b"said\n", b"complaint\n")
        assert main.returncode == 1
