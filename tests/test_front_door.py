from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import errors
from shardio.map_view import MapView

ROOT = Path(__file__).resolve().parent.parent


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds only the checkout's shardio."""
    before = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    command = [sys.executable, "-c", before + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", shardio.__all__)
def test_a_public_name_leads_to_something(name: str) -> None:
    assert getattr(shardio, name) is not None


# There is no more room at the door for what few programs will ever catch.
INNER = frozenset(
    "BatchTimeout CacheFull ChecksumMismatch DatasetConflict DatasetCorrupt DatasetExists "
    "DatasetNotFound UnsupportedEnvironment ClosedError InsufficientMemory SchemaError "
    "ServerUnreachable ShardNotFound ShardChanged ShardExists ShardIncomplete "
    "ShardUnsupported StoreAccessDenied StoreUnavailable TooManySkipped TransformError".split()
)


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - INNER))
def test_every_error_is_at_the_front_door(name: str) -> None:
    assert getattr(shardio, name) is getattr(errors, name)


def test_the_public_names_are_sorted() -> None:
    assert shardio.__all__ == sorted(shardio.__all__)


def test_there_are_at_most_forty_public_names() -> None:
    assert len(set(shardio.__all__)) == len(shardio.__all__) <= 40


def test_the_type_checker_sees_each_name_at_the_home_where_it_is_found() -> None:
    tree = ast.parse((ROOT / "shardio" / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and "TYPE" in ast.unparse(n.test))
    seen = {
        alias.asname or alias.name: (statement.module, alias.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    found = {
        name: (shardio._HOMES.get(name, "shardio.errors"), shardio._NAMES_AT_HOME.get(name, name))
        for name in shardio.__all__
        if name != "__version__"
    }
    assert seen == found


def test_dir_lists_names_that_are_not_loaded_yet() -> None:
    assert set(shardio.__all__) <= set(dir(shardio))


def test_an_unknown_name_is_an_attribute_error_that_says_it() -> None:
    with pytest.raises(AttributeError, match="'shardio' has no attribute 'Lodaer'"):
        getattr(shardio, "Lodaer")  # noqa: B009 - a checker would refuse the plain spelling


def test_a_name_of_errors_that_is_not_public_is_not_at_the_front_door() -> None:
    assert hasattr(errors, "_rebuild")
    assert not hasattr(shardio, "_rebuild")


def test_documented_modules_are_attributes_and_python_corrects_mistyped_names() -> None:
    text = "".join(page.read_text() for page in ROOT.glob("docs/[hr]*/**/*.md"))
    found = {*re.findall(r"(?:from |import |## )shardio\.([a-z]\w*)", text)} - {*shardio.__all__}
    assert found <= {*shardio._MODULES} <= {*dir(shardio)}
    assert not _run("import shardio\nfor x in shardio._MODULES: getattr(shardio, x).__all__").stderr
    assert "Did you mean: 'ShardLoader'?" in _run("import shardio\nshardio.ShardLaoder").stderr


@pytest.mark.parametrize(
    ("function", "option", "hint"),
    [
        (shardio.open, "split", "write subset="),
        (shardio.Array, "nullable", "write optional=True"),
        (shardio.Text, "nullable", "write optional=True"),
        (shardio.Text, "max_length", "its options are codec, optional"),
        (shardio.List, "compression", 'write codec="zstd"'),
        (shardio.open, "transform", "pass it to shardio.ShardLoader"),
        (shardio.open, "columns", "write fields=[…] for shardio.ShardLoader"),
        (
            shardio.ShardLoader,
            "split",
            'write ShardLoader(shardio.open(path, subset="train"), batch',
        ),
        (shardio.ShardDataset.clips, "num_frames", "did you mean 'frames'?"),
        (shardio.ShardDataset.pack, "seq_len", "write length="),
        (shardio.mix, "weight", "did you mean 'weights'?"),
        (shardio.WeightedSampler, "num_samples", "write n_draws="),
        (shardio.ShardLoader, "target_transform", "write transform=f, which gets the whole"),
        (shardio.ShardLoader, "columns", "write fields=[…]"),
        (shardio.ShardLoader, "num_replicas", "write world_size="),
        (
            shardio.DatasetWriter,
            "overwrite",
            "write shardio.convert(samples, path, schema=schema, overwrite=True)",
        ),
        (shardio.ShardLoader, "format", 'write output="torch"'),
        (shardio.ShardLoader, "pipelines", "write transform=shardio.transforms.Compose(…)"),
        (shardio.ShardDataset.clips, "clip_length", "write frames="),
        (shardio.DataLoader, "shuffle", "write shardio.ShardLoader(dataset, batch_size,"),
        (shardio.Schema, "image", 'write the fields as a dict, Schema({"image": shardio.Im'),
        (shardio.Array, "compression", 'write codec="zstd"'),
        (shardio.DatasetWriter, "columns", "write schema=shardio.Schema({…})"),
    ],
)
def test_unknown_options_get_a_hint(function: Callable[..., Any], option: str, hint: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"has no option {option!r}: {hint}")) as caught:
        function(None, **{option: 1})
    assert [str(frame.path) for frame in caught.traceback] == [__file__]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: shardio.open("nowhere/"),
        lambda: shardio.ShardLoader("nowhere/", 8),
        lambda: shardio.ShardLoader("nowhere/", 0),
    ],
    ids=["open", "loader", "batch_size"],
)
def test_the_traceback_of_a_mistake_ends_in_the_callers_line(mistake: Callable[[], Any]) -> None:
    with pytest.raises(errors.ShardioError) as caught:
        mistake()
    assert {str(frame.path) for frame in caught.traceback} == {__file__}


@pytest.mark.parametrize(
    ("function", "values", "said"),
    [
        (
            shardio.ShardLoader,
            ("set/", 8, "train"),
            'shardio.open(path, subset="train"), batch_size',
        ),
        (shardio.ShardLoader, ("set/", 8, True), "found True, too: write shuffle=True"),
        (shardio.ShardLoader, ("set/", 8, 4), "write the name of the option: fields=, shuffle=, "),
        (
            shardio.ShardLoader,
            ("set/",),
            "needs batch_size: write ShardLoader(dataset, batch_size)",
        ),
        (shardio.ShardLoader, (), "ShardLoader needs dataset and batch_size: write"),
        (shardio.open, ("set/", "train"), "shardio.open takes only path by position; found 'tr"),
        (shardio.open, ("set/", "train"), "'train', too: write subset=\"train\""),
        (shardio.open, (), "shardio.open needs path: write shardio.open(path)"),
        (shardio.WeightedSampler, (), "needs weights: write WeightedSampler(weights)"),
        (shardio.ShardDataset.pack, (None, "x"), "pack needs length: write pack(length=…)"),
        (shardio.Schema, (), "write Schema(fields); a dict, such as {'image': shardio.Image()}"),
        (
            shardio.mix,
            ("a/", "b/"),
            "mix takes only sources by position; found 'b/', too: write mix([",
        ),
        (shardio.transforms.Resize, (64, 64), "found 64, too: write Resize((height, width))"),
        (
            shardio.transforms.CenterCrop,
            (64, 64),
            "found 64, too: write CenterCrop((height, width))",
        ),
        (MapView, ("set/", abs), "too: write MapView(dataset, transform=f)"),
        (
            shardio.load,
            ("set/",),
            "shardio.load(loader, items); to read a dataset, write shardio.open",
        ),
    ],
)
def test_values_without_names_get_a_hint(
    function: Callable[..., Any], values: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        function(*values)


def test_a_transform_of_another_library_is_answered_with_ours() -> None:
    for name, hint in {
        "RandomHorizontalFlip": "write HorizontalFlip()",
        "ToTensor": "write ToFloat(), and output='torch'",
        "Resizes": "did you mean 'Resize'?",
        "GaussianBlur": "it has CenterCrop, .*OnTensors runs transforms of torchvision",
    }.items():
        text = f"no attribute '{name}': {re.sub(r'[()?]', r'.', hint)}"
        with pytest.raises(AttributeError, match=text):
            getattr(shardio.transforms, name)
        with pytest.raises(ImportError, match=text):
            exec(f"from shardio.transforms import {name}")


def test_submodules_are_imported_also_if_their_names_get_a_hint() -> None:
    assert not _run("from shardio.maintenance import statistics, verify\nverify.dataset").stderr
    assert not _run("from shardio.transforms import geometry\ngeometry.Resize").stderr


@pytest.mark.parametrize("package", ["av", "multiprocessing", "numpy", "tinygrad"])
def test_importing_shardio_does_not_load(package: str) -> None:
    done = _run(f"import shardio, sys; sys.exit({package!r} in sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")


def test_windows_is_refused_with_one_clear_line() -> None:
    done = _run("sys.platform = 'win32'\nimport shardio")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "shardio.errors.UnsupportedEnvironment: "
        "shardio needs Linux; on Windows, run it inside WSL 2"
    )
