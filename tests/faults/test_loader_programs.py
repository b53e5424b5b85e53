"""Programs as people write them: without a guard, on standard input, beside modules."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from shardio import Array, Schema
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


@pytest.mark.cpu_device
def test_the_example_of_the_readme_works_as_it_stands(stage: Scene, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    examples: list[str] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    example = next(text for text in examples if "ShardLoader(" in text)
    assert len(example.splitlines()) <= 12
    (tmp_path / "script.py").write_text(example)
    schema = Schema({"frames": Array("uint8", (4, 12, 12, 3)), "label": Array("int64")})
    samples = ({"frames": np.full((4, 12, 12, 3), i, np.uint8), "label": i % 2} for i in range(20))
    write_dataset(tmp_path / "out", 20, 2, schema, samples)
    main = stage.start(["script.py"], cwd=tmp_path)
    printed = [line(main).split() for _ in range(2)]
    assert [epoch for epoch, _ in printed] == ["0", "1"]
    assert all(math.isfinite(float(loss)) for _, loss in printed)
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}
