"""A program that hangs fails its test with its output, even if other processes hold its pipes."""

from __future__ import annotations

from tests.faults.scene import line, scene

HANGS_WITH_CHILD = """
import os, time
if os.fork() == 0:
    print("forked", flush=True)
time.sleep(1000)
"""


def test_a_program_that_hangs_says_where_though_its_child_lives_on() -> None:
    with scene() as stage:
        main = stage.start(["-c", HANGS_WITH_CHILD])
        assert line(main) == "forked"
        said = line(main, patience_s=0)
    assert said.startswith("no output for 0 s; standard error: Fatal Python error: Aborted")
    assert 'File "<string>", line 5 in <module>' in said
