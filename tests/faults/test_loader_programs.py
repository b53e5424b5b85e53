"""Programs as people write them: without a guard, on standard input, beside modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scene import PATIENCE_S, Scene, line
from tests.loading import TWO_FIELDS, two_fields, write_dataset

UNGUARDED = """
import numpy
from shardio import ShardLoader

print("imported", flush=True)
shift = 100

class Picture:
    def __init__(self, image):
        self.image = image

    def brightest(self):
        return self.image.max()

def prepare(sample, rng):
    picture = Picture(sample["image"])
    return {{"brightest": picture.brightest(), "label": sample["label"] + shift}}

loader = ShardLoader({folder!r}, 10, output="numpy", num_workers=2, transform={transform})
total = sum(int(batch["label"].sum()) for batch in loader)
print(total, flush=True)
"""
TOTAL = str(sum(range(100, 130)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("programs") / "set"
    return write_dataset(made, 30, 2, TWO_FIELDS, two_fields(30))


def _assert_prints(stage: Scene, arguments: list[str], *expected: str, stdin: str = "") -> None:
    main = stage.start(arguments, stdin=stdin.encode())
    assert [line(main) for _ in expected] == list(expected)
    assert main.stdout is not None
    assert main.wait(PATIENCE_S) == 0
    assert main.stdout.read() == b""  # also: nothing was run twice
    assert stage.left_after() == {}


@pytest.mark.parametrize("how", ["a file", "standard input", "the command line", "a notebook"])
@pytest.mark.parametrize(
    "transform",
    ["prepare", 'lambda sample: {"label": sample["label"] + shift}'],
    ids=["function", "lambda"],
)
def test_scripts_need_no_guard(
    stage: Scene, tmp_path: Path, folder: str, transform: str, how: str
) -> None:
    script = UNGUARDED.format(folder=folder, transform=transform)
    place = tmp_path / "script.py"
    place.write_text(script)
    arguments = {
        "a file": [str(place)],
        "standard input": ["-"],
        "the command line": ["-c", script],
        "a notebook": ["-c", f"exec({script!r})"],
    }[how]
    stdin = script if how == "standard input" else ""
    _assert_prints(stage, arguments, "imported", TOTAL, stdin=stdin)


def test_a_transform_may_live_beside_the_script(stage: Scene, tmp_path: Path, folder: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "shifts.py").write_text("SHIFT = 90\n")
    (tmp_path / "beside.py").write_text(
        "from package import shifts\n"
        "def prepare(sample):\n"
        "    return {'label': sample['label'] + shifts.SHIFT + 10}\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import beside\n" + UNGUARDED.format(folder=folder, transform="beside.prepare")
    )
    _assert_prints(stage, [str(script)], "imported", TOTAL)


def test_a_program_that_runs_threads_and_holds_locks_works(stage: Scene, folder: str) -> None:
    script = """
import threading, time
lock = threading.Lock()
def hold():
    while True:
        with lock: time.sleep(0.0001)
for _ in range(4): threading.Thread(target=hold, daemon=True).start()
""" + UNGUARDED.format(folder=folder, transform="prepare")
    _assert_prints(stage, ["-c", script], "imported", TOTAL)


def test_what_a_transform_prints_is_seen(stage: Scene, folder: str) -> None:
    script = f"""
from shardio import ShardLoader
def shout(sample):
    print("sample", sample["label"])
    return {{"label": sample["label"]}}
with ShardLoader({folder!r}, 30, output="numpy", num_workers=1, transform=shout) as loader:
    list(loader)
"""
    main = stage.start(["-c", script])
    output, _ = main.communicate(timeout=PATIENCE_S)
    assert output.decode().splitlines() == [f"sample {i}" for i in (0, *range(30))]
