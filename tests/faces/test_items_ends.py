"""Programs that end in the middle of load_with_workers leave nothing, whatever workers do."""

from __future__ import annotations

import signal

import pytest

from tests.faults.scene import PATIENCE_S, STUCK, Scene, line

PROGRAM = f"""{STUCK}
import os, signal, sys
from itertools import count
from shardio import Loader, load_with_workers

class Stuck(Loader):
    def make_request(self, item):
        return {{{{"label": item}}}}
    def load(self, request):
        {{stuck}}(request)
        return request["label"]
    def post_process(self, response):
        return response
    def shutdown(self):
        print("shutdown", flush=True)

loading = load_with_workers(Stuck(), count(), 2)
{{then}}
"""


def start(stage: Scene, stuck: str, then: str) -> list[str]:
    """Run the program to its end; returns the last line of standard error."""
    program = PROGRAM.format(stuck=stuck, then=then)
    main = stage.start(["-c", program])
    assert line(main) == "ready"
    if "pass" in then:
        main.send_signal(signal.SIGINT)
    assert line(main) == "shutdown"
    _, said = main.communicate(timeout=PATIENCE_S)
    assert stage.left_after() == {}
    return said.decode().splitlines()[-1:]


READY = "for n in loading:\n    if n == 7: print('ready', flush=True)\n"


@pytest.mark.parametrize("stuck", ["linger", "spin"])
def test_ctrl_c_ends_the_wait_and_all_workers(stage: Scene, stuck: str) -> None:
    assert start(stage, stuck, READY + "    pass") == ["KeyboardInterrupt"]


def test_the_end_of_the_program_ends_a_pass_that_it_holds(stage: Scene) -> None:
    assert start(stage, "spin", READY + "    if n == 7: break") == []


def test_an_exception_in_the_body_ends_the_program_as_any_other(stage: Scene) -> None:
    assert start(stage, "linger", READY + "    if n == 7: 1 / 0") == [
        "ZeroDivisionError: division by zero"
    ]
