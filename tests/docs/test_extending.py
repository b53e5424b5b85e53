"""The page on extending shardio lists every file that such an extension has touched so far."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_collections")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing" / "extend.md"
TREES = ("shardio", "converters/shardio_converters", "tools/shardio_tools")


def nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module, without those of its docstrings."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        stack.extend(ast.iter_child_nodes(node))


@functools.cache
def words(path: Path) -> set[str]:
    """Return the identifiers, imported names and short strings of a module."""
    found = set()
    for node in nodes(ast.parse(path.read_bytes())):
        match node:
            case ast.Name(id=name) | ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                found |= {name, f"{owner}.{name}"}
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom(module=str(module), names=names):
                found |= {alias.name for alias in names}
                found |= {f"{module}.{alias.name}" for alias in names}
            case ast.Call(func=ast.Name(id=name), args=given):
                found |= {
                    f"{name}({arg.value!r})" for arg in given if isinstance(arg, ast.Constant)
                }
            case ast.Constant(value=str(text)):
                found.add(f"'{text}'")
    return found


# Of each section of the page, what the example of it is named in code.
EXAMPLES = {
    "a field type": {"Audio", "FieldType.AUDIO", "Required.AUDIO"},
    "a codec": {"ZSTD_DICTIONARY", "'zstd_dictionary'", "has_dictionary"},
    "an order": {"ShardEpochOrder", "ShardShuffle"},
    "an output": {"JaxAdapter", "'jax'"},
    "a converter": {"TokenFiles", "'shardio_converters.records.tokens:TokenFiles'"},
    "a command": {"Commands('diff')", "shardio.maintenance.diff"},
}


def section(title: str) -> str:
    """Return the section of the page under "## Add `title`"."""
    found = re.search(rf"^## Add {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    assert found is not None, f"{PAGE}: no section 'Add {title}'"
    return found[1]


def listed(title: str) -> list[str]:
    """Return the files in the first column of a section's table."""
    rows = re.findall(r"^\| (`.*?) \|", section(title), re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("title", sorted(EXAMPLES))
def test_a_section_lists_every_module_that_names_its_example(title: str) -> None:
    touched = {
        str(path.relative_to(ROOT))
        for tree in TREES
        for path in sorted((ROOT / tree).rglob("*.py"))
        if EXAMPLES[title] & words(path)
    }
    modules = [name for name in listed(title) if name.startswith(TREES) and name.endswith(".py")]
    assert sorted(modules) == sorted(touched)


@pytest.mark.parametrize(
    ("title", "module"), [("a field type", "points.py"), ("a codec", "zlib_codec.py")]
)
def test_the_diff_of_a_section_is_what_tests_register(title: str, module: str) -> None:
    diff = re.search(rf"^\+\+\+ \S+/{module}\n(.*?)^---", section(title), re.M | re.S)
    assert diff is not None
    shown = "".join(line.removeprefix("+") for line in diff[1].splitlines(keepends=True))
    assert shown == (ROOT / "tests" / "format" / module).read_text()


@pytest.mark.parametrize("title", sorted(EXAMPLES))
def test_a_section_names_files_that_exist(title: str) -> None:
    names = listed(title)
    assert names and [name for name in names if not (ROOT / name).exists()] == []


def test_the_diff_of_an_order_is_that_of_the_order_that_is_tested() -> None:
    found = re.search(r"^```diff\n(.*?)^```$", section("an order"), re.M | re.S)
    assert found is not None
    lines = [line[1:] for line in found[1].splitlines() if not line.startswith(("---", "+++"))]
    tested = (ROOT / "tests" / "order" / "strided.py").read_text().splitlines()
    assert lines[1:] == tested[tested.index("from __future__ import annotations") + 2 :]
    assert lines[0] == '    "strided": Strided,'


def test_the_page_has_an_example_for_each_section() -> None:
    titles = re.findall(r"^## Add (.+)$", PAGE.read_text(), re.M)
    assert sorted(titles) == sorted(EXAMPLES)
