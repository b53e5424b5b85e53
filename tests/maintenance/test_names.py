"""The public names of `shardio.maintenance`, each loaded from its module when it is first used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardio import maintenance


def test_each_name_leads_to_what_the_type_checker_sees_at_its_home() -> None:
    tree = ast.parse(Path(maintenance.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and "TYPE" in ast.unparse(n.test))
    seen = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == maintenance._HOMES
    assert sorted(seen) == maintenance.__all__
    for name, home in seen.items():
        assert getattr(maintenance, name) is vars(sys.modules[str(home)])[name]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("validate", "write shardio.maintenance.verify_dataset"),
        ("stats", "write shardio.maintenance.compute_stats"),
        ("compute_statistics", "did you mean 'compute_stats'?"),
        ("x", "it has add_column, add_subset, compact, compute_stats, diff, "),
    ],
)
def test_a_name_that_is_missing_gets_a_hint(name: str, hint: str) -> None:
    text = re.escape(f"has no attribute {name!r}: {hint}")
    with pytest.raises(AttributeError, match=text):
        getattr(maintenance, name)
    with pytest.raises(ImportError, match=text):
        exec(f"from shardio.maintenance import {name}")


def test_who_audits_loads_nothing_that_reads_datasets_or_rewrites_them() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import shardio.maintenance.jobs; "
        "import shardio.maintenance.verify.shard; "
        "print(*[m for m in sys.modules if m.startswith('shardio')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "shardio.maintenance.verify.shard" in loaded
    names = ("_engine", "dataset", "maintenance.re", "shard.reader", "shard.writer")
    needless = tuple(f"shardio.{name}" for name in names)
    assert {name for name in loaded if name.startswith(needless)} == set()
