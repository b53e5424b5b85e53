"""The layers of the tree: RANKS lists them, and these tests check every import against it.

A module imports from lower ranks and its own package only: never upward, never sideways, never from
the front door, always absolutely. LEVELS gives some packages an order of their own. From rank 16 on
modules see what users see: the front door, public modules, and their own package. The command line
also shows sizes, names and progress as notebooks do, with SHARED_WITH_COMMANDS.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from shardio.format.types import FIELD_TYPES

pytestmark = pytest.mark.usefixtures("no_collections")

ROOT = Path(__file__).resolve().parent.parent

# A package's rank is that of everything in it; a module in no rank is an error.
RANKS = {
    "shardio.errors": 0,
    "shardio._base": 1,  # knows of no other part
    "shardio.format": 2,  # bytes <-> values
    "shardio.outputs": 3,  # frameworks stop here
    "shardio.media": 3,  # encoded bytes <-> pixels and samples
    "shardio.storage": 3,  # local files
    "shardio.batch": 4,  # the layout of a block, collation, Batch
    "shardio.shard": 4,  # one shard file
    "shardio.transforms": 4,
    "shardio._workers": 5,  # worker processes, and the memory they share
    "shardio.order": 6,  # the sample at each position
    "shardio.storage.remote": 7,  # object stores, and the cache of what is in them
    "shardio.dataset": 8,  # a folder of shards
    "shardio.samples": 9,  # datasets as sequences of samples, and views of them
    "shardio.maintenance": 10,
    "shardio._engine": 11,  # batches into blocks
    "shardio.conversion": 11,
    "shardio.export": 11,
    "shardio._loading": 12,  # behind what users construct
    "shardio.items": 13,
    "shardio.serving.client": 13,  # batches that another machine decodes
    "shardio.pipeline": 13,
    "shardio.loader": 14,
    "shardio.multi": 14,
    "shardio.map_view": 15,
    "shardio.measuring": 15,
    "shardio.serving": 15,
    "shardio_converters": 16,
    "shardio_tools": 16,
}
OUTERMOST = 16

# The order inside a package, for those that have one: a folder imports from the levels before its
# own, and nothing of its own level but itself. "" is what lies in no folder.
LEVELS = {
    "shardio._workers": (
        ("processes",),  # worker processes, and the memory they share
        ("tasks",),  # functions over items, in workers, threads, coroutines
        ("",),  # `ray_cluster`: Ray stops here
    ),
    "shardio._engine": (
        ("filling",),  # a batch into a block
        ("dispatch",),  # who fills which step in which block
    ),
    "shardio_converters": (
        ("",),  # shared by the families of converters
        ("arrays", "media", "tabular"),
        ("records", "robots"),
    ),
}
PUBLIC_MODULES = {
    "shardio.conversion",
    "shardio.errors",
    "shardio.export",
    "shardio.map_view",
    "shardio.measuring",
    "shardio.media",
    "shardio.multi",
    "shardio.pipeline",
    "shardio.serving",
    "shardio.outputs",
    "shardio.maintenance",
    "shardio.transforms",
}

SHARED_WITH_COMMANDS = "shardio._base.progress"

# The front door leads everywhere, by way of names; `python -m shardio` is the command line.
FRONT_DOOR = "shardio"
MAY_IMPORT_ANYTHING = {FRONT_DOOR, "shardio.__main__"}

# Packages that only these may import: slow to load, or not there for everyone.
HOMES_OF_PACKAGES = {
    # The demo trains as users do; it has a network of NumPy for where tinygrad does not work.
    "tinygrad": {
        "shardio.outputs.tinygrad",
        "shardio.outputs.tinygrad_internals",
        "shardio_tools.demo",
    },
    "torch": {"shardio.outputs.torch"},
    "jax": {"shardio.outputs.jax"},
    "ray": {"shardio._workers.ray_cluster"},
    # The sample clips are drawn and encoded without shardio: they stand for a user's own files.
    "av": {"shardio.media", "shardio_tools.sample_clips"},
    "PIL": {"shardio.media", "shardio_tools.inspect.pictures"},
    "simplejpeg": {"shardio.media"},
    "obstore": {"shardio.storage.remote.connection"},
    "zmq": {"shardio._workers.tasks.zeromq"},
    "anyio": {"shardio_tools.view"},
    # Only to name the extra that is missing.
    "starlette": {"shardio_tools.view", "shardio.samples.preview"},
    "uvicorn": {"shardio_tools.view"},
}
LOADED_LATE = {"av", "PIL", "jax", "obstore", "simplejpeg", "torch", "zmq"}
PROCESS_ENTRIES = (
    "shardio._workers.tasks.zeromq",
    "shardio._engine.dispatch.worker",
    "shardio._workers.processes.zygote",
)


def _modules() -> dict[str, Path]:
    found = {}
    for base, package in ((".", "shardio"), ("converters", "shardio_converters")):
        found.update(_modules_below(ROOT / base, package))
    return found | _modules_below(ROOT / "tools", "shardio_tools")


def _modules_below(base: Path, package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()
EXAMPLES = {path.stem: path for path in sorted((ROOT / "docs" / "examples").glob("*.py"))}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


@functools.cache
def _all_nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _nodes(
    root: ast.AST, *, at_run_time: bool = False, at_import: bool = False
) -> Iterator[ast.AST]:
    """Walk a module, without the branches that only type checkers or only calls reach."""
    parents = [root]
    while parents:
        for node in ast.iter_child_nodes(parents.pop()):
            if at_run_time and _is_type_checking(node):
                continue
            if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            yield node
            parents.append(node)


def _imported(node: ast.AST) -> list[str]:
    """Return the modules that an import statement, or a call of `import_extra`, imports.

    `from a import b` is a.b if that is a module.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in MODULES else node.module for name in names]
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "import_extra":
        return [ast.literal_eval(module) for module in node.args[2:]]
    return []


@functools.cache
def _imports(path: Path, *, at_run_time: bool = False, at_import: bool = False) -> tuple[str, ...]:
    nodes: Iterable[ast.AST] = _all_nodes(path)
    if at_run_time or at_import:
        nodes = _nodes(_tree(path), at_run_time=at_run_time, at_import=at_import)
    return tuple(name for node in nodes for name in _imported(node))


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _place(module: str) -> str | None:
    return max((place for place in RANKS if _is_within(module, place)), key=len, default=None)


def _offence(module: str, imported: str) -> str | None:
    place, other = _place(module), _place(imported)
    if not _is_within(imported, FRONT_DOOR) and other is None:
        return None  # somebody else's package
    if place is None:
        return f"{module} is in no rank"
    if other == place:
        return _offence_inside(place, module, imported)
    if RANKS[place] >= OUTERMOST and not _is_within(imported, module.partition(".")[0]):
        is_shared = place == "shardio_tools" and imported == SHARED_WITH_COMMANDS
        is_seen = is_shared or _is_public(imported)
        return None if is_seen else f"{module} imports {imported}, which is not public"
    if other is None:
        return f"{module} imports {imported}, which is the front door or in no rank"
    if RANKS[other] >= RANKS[place]:
        return f"{module} (rank {RANKS[place]}) imports {imported} (rank {RANKS[other]})"
    return None


def _offence_inside(package: str, module: str, imported: str) -> str | None:
    """Return the rule of LEVELS that an import between two modules of a package breaks, if any."""
    levels = LEVELS.get(package)
    if levels is None or package in {module, imported}:
        return None
    folder, other = _folder(package, module), _folder(package, imported)
    above, below = ([name in names for names in levels].index(True) for name in (folder, other))
    if folder == other or below < above:
        return None
    return f"{module} imports {imported}, which is not below it in {package}"


def _folder(package: str, module: str) -> str:
    """Return the folder of a package that a module lies in: "" if it is a module of the package."""
    inner = module.removeprefix(package + ".").split(".")
    return inner[0] if any(inner[0] in names for names in LEVELS[package]) else ""


def _is_public(imported: str) -> bool:
    return imported == FRONT_DOOR or imported in PUBLIC_MODULES


def test_every_module_has_a_rank() -> None:
    assert [m for m in MODULES.keys() - MAY_IMPORT_ANYTHING if _place(m) is None] == []


def test_a_module_imports_only_from_lower_ranks_and_its_own_folder() -> None:
    offences = [
        _offence(module, name)
        for module in sorted(MODULES.keys() - MAY_IMPORT_ANYTHING)
        for name in _imports(MODULES[module])
    ]
    assert [text for text in offences if text] == []


def _rows_of_the_map() -> list[str]:
    """Return the packages and modules that shardio/README.md lists, in its order."""
    page = (ROOT / "shardio" / "README.md").read_text()
    table = page[page.index("| package |") : page.index("| to find |")]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    names = [name for cell in cells for name in re.findall(r"`([\w./]+?)(?:\.py|/)`", cell)]
    return [f"shardio.{name.replace('/', '.')}" for name in names]


def test_the_map_of_the_library_lists_everything_and_below_all_that_it_imports() -> None:
    rows = _rows_of_the_map()
    tops = {".".join(m.split(".")[:2]) for m in MODULES if m.startswith("shardio.")}
    assert {row for row in rows if row.count(".") == 1} == tops - {"shardio.__main__"}
    nested_first = sorted(rows, key=len, reverse=True)
    lines = {
        name: next(rows.index(row) for row in nested_first if _is_within(name, row))
        for name in MODULES
        if any(_is_within(name, row) for row in rows)
    }
    upward = {
        (module, imported)
        for module in lines
        for imported in _imports(MODULES[module])
        if lines.get(imported, -1) > lines[module]
    }
    assert upward == set()


def test_the_map_of_the_library_names_files_that_exist() -> None:
    page = (ROOT / "shardio" / "README.md").read_text()
    names = re.findall(r"`([\w/]+(?:\.py|/))`", page[page.index("| to find |") :])
    assert names and [name for name in names if not (ROOT / "shardio" / name).exists()] == []


def test_the_map_of_the_library_names_functions_that_their_files_define() -> None:
    page = (ROOT / "shardio" / "README.md").read_text()
    rows = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", page[page.index("| to find |") :])
    missing = [
        (file, name)
        for file, names in rows
        for name in names.split(".")
        if not any(
            getattr(node, "name", None) == name for node in _all_nodes(ROOT / "shardio" / file)
        )
    ]
    assert rows and missing == []


@pytest.mark.parametrize(
    ("module", "imported", "is_offence"),
    [
        ("shardio.shard.reader", "shardio.format.layout", False),
        ("shardio.shard.reader", "numpy", False),
        ("shardio.format.sections", "shardio.shard.reader", True),
        ("shardio.items", "shardio.multi", True),
        ("shardio.shard.reader", "shardio", True),
        ("shardio.shard.reader", "shardio.nowhere", True),
        ("shardio._workers.tasks.task_pool", "shardio._workers.processes.worker_main", False),
        ("shardio._workers.processes.worker_main", "shardio._workers.tasks.task_pool", True),
        ("shardio_tools.cli", "shardio.errors", False),
        ("shardio_tools.cli", "shardio.shard.reader", True),
        ("shardio_tools.cli", "shardio._base.progress", False),
        ("shardio_tools.cli", "shardio._base.html", True),
        ("shardio_converters.media.videos", "shardio._base.progress", True),
        ("shardio_tools.cli", "shardio_converters.media.videos", True),
        ("shardio_converters.media.videos", "shardio_converters.schema_spec", False),
        ("shardio_converters.media.videos", "shardio_converters.arrays.array_samples", True),
        ("shardio_converters.schema_spec", "shardio_converters.arrays.array_samples", True),
    ],
)
def test_ranks_decide_allowed_imports(module: str, imported: str, is_offence: object) -> None:
    assert (_offence(module, imported) is not None) is is_offence


def test_a_module_imports_absolutely() -> None:
    imports = ((p, n) for p in MODULES.values() for n in _all_nodes(p))
    relative = [(p, n.lineno) for p, n in imports if isinstance(n, ast.ImportFrom) and n.level]
    assert relative == []


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_shows_public_names_only(name: str) -> None:
    ours = [i for i in _imports(EXAMPLES[name]) if _place(i) or _is_within(i, FRONT_DOOR)]
    assert [imported for imported in ours if not _is_public(imported)] == []


@pytest.mark.parametrize("package", sorted(HOMES_OF_PACKAGES))
def test_a_heavy_package_is_imported_only_where_it_is_at_home(package: str) -> None:
    users = {m for m, p in MODULES.items() if any(_is_within(i, package) for i in _imports(p))}
    homes = HOMES_OF_PACKAGES[package]
    assert {user for user in users if not any(_is_within(user, home) for home in homes)} == set()


def test_a_package_that_loads_late_is_imported_inside_functions() -> None:
    early = [
        (module, name)
        for module, path in MODULES.items()
        for name in _imports(path, at_run_time=True, at_import=True)
        if name.partition(".")[0] in LOADED_LATE
    ]
    assert early == []


def _closure(entry: str) -> dict[str, tuple[str, ...]]:
    """Return all modules that importing a module loads, the packages on the way included."""
    reached: dict[str, tuple[str, ...]] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        parent = module.rpartition(".")[0]
        if module in reached or module not in MODULES:
            continue
        reached[module] = _imports(MODULES[module], at_run_time=True)
        waiting += [*reached[module], parent]
    return reached


@pytest.mark.parametrize("entry", PROCESS_ENTRIES)
def test_what_a_worker_process_loads_never_reaches_multiprocessing_or_tinygrad(entry: str) -> None:
    reached = _closure(entry)
    assert entry in reached, f"{entry} does not exist"
    assert {
        module: name
        for module, names in reached.items()
        for name in names
        if name.partition(".")[0] in {"multiprocessing", "tinygrad"}
    } == {}


FACES = (
    "shardio.items",
    "shardio.loader",
    "shardio.multi",
    "shardio.pipeline",
    "shardio._loading.sources",
)
OF_THE_ENGINE = frozenset(
    "_posixsubprocess _queue _socket _thread asyncio concurrent multiprocessing queue select"
    " selectors signal socket subprocess threading zmq".split()
)
STARTS_PROCESSES = re.compile(r"fork|forkpty|popen|posix_spawnp?|spawn[lv]p?e?|system")


def _machinery(tree: ast.Module) -> set[str]:
    """Return the queues, threads, processes, sockets and locks that a module uses."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            packages = {name.partition(".")[0] for name in _imported(node)}
            names = {alias.name for alias in node.names}  # also through another module
            found |= (packages | names) & OF_THE_ENGINE
            if packages == {"os"}:
                found |= {name for name in names if STARTS_PROCESSES.fullmatch(name)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
            found |= {node.attr} if STARTS_PROCESSES.fullmatch(node.attr) else set()
    return found


@pytest.mark.parametrize("face", FACES)
def test_a_face_has_no_queue_and_no_thread_process_socket_or_lock_of_its_own(face: str) -> None:
    assert _machinery(_tree(MODULES[face])) == set()


def test_library_code_never_prints() -> None:
    library = [path for m, path in MODULES.items() if not _is_within(m, "shardio_tools")]
    calls = ((p, n) for p in library for n in _all_nodes(p) if isinstance(n, ast.Call))
    prints = {"print", "sys.stdout.write"}
    assert [(p, call.lineno) for p, call in calls if ast.unparse(call.func) in prints] == []


def test_only_field_types_are_told_apart_by_their_classes() -> None:
    """All other code asks the field, so that a new type needs no change elsewhere."""
    kinds = {prefix + kind.__name__ for kind in FIELD_TYPES.values() for prefix in ("", "shardio.")}
    others = (p for m, p in MODULES.items() if not _is_within(m, "shardio.format.types"))
    calls = ((p, n) for p in others for n in _all_nodes(p) if isinstance(n, ast.Call))
    tests = ((p, n) for p, n in calls if ast.unparse(n.func) == "isinstance")
    named = ((p, n, {ast.unparse(each) for each in ast.walk(n.args[1])}) for p, n in tests)
    assert [(p, n.lineno) for p, n, names in named if names & kinds] == []


def test_packages_of_many_modules_have_a_map_that_names_each() -> None:
    folders = {path.parent for path in MODULES.values() if path.is_relative_to(ROOT / "shardio")}
    folders |= {path.parent for path in MODULES.values() if "shardio_converters" in path.parts}
    modules = {f: {m.name for m in f.glob("*.py")} - {"__init__.py"} for f in folders}
    large = {folder: names for folder, names in modules.items() if len(names) > 8}
    engine = ROOT / "shardio" / "_engine"
    large[engine] = {path.name for path in engine.rglob("*.py")} - {"__init__.py"}
    assert len(large) > 5 and len(large[engine]) > 10
    for folder, names in large.items():
        page = (folder / "README.md").read_text()
        rows = [line for line in page.splitlines() if line[:1] == "|"]
        assert {name for name in names if not any(f"`{name}`" in row for row in rows)} == set()


CHANGES_FILES = re.compile(
    r"os\.(chmod|chown|copy_file_range|fdatasync|fsync|ftruncate|link|makedirs|mkdir|mkfifo|mknod"
    r"|posix_fallocate|pwrite|pwritev|remove|removedirs|rename|renames|replace|rmdir|sendfile"
    r"|symlink|truncate|unlink|utime|write|writev)"
    r"|shutil\.(?!disk_usage|which|get_terminal_size)\w+|tempfile\.\w+"
    r"|(?!fs\.).+\.(chmod|hardlink_to|mkdir|rename|rmdir|symlink_to|touch|unlink"
    r"|write_bytes|write_text)"
)
OPENS_FOR_WRITING = re.compile(r"O_(APPEND|CREAT|RDWR|TRUNC|WRONLY)")
MAY_CHANGE_FILES = {
    "shardio._workers.processes.blocks": "memory files",
    "shardio._workers.processes.linux": "memory files",
    "shardio._workers.processes.shared_memory": "memory files",
    "shardio._workers.processes.stack_dumps": "memory files",
    "shardio._workers.tasks.zeromq": "makes the folder of a socket",
    "shardio.storage.fs": "all other changes",
}
"""Modules that change files without `shardio.storage.fs`, each with the reason."""


def _file_changes(path: Path) -> set[str]:
    found = set()
    for node in _all_nodes(path):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), [*map(ast.unparse, node.args[1:2])]
        if CHANGES_FILES.fullmatch(name):
            found.add(name)
        elif name == "os.open" and OPENS_FOR_WRITING.search(arguments[0]):
            found.add(name)
        elif name == "open" and re.search("[wax+]", (arguments or ["'r'"])[0]):
            found.add(name)
    return found


def test_only_one_module_changes_the_file_system() -> None:
    library = {m: path for m, path in MODULES.items() if _is_within(m, "shardio")}
    changes = {m: found for m, path in library.items() if (found := _file_changes(path))}
    assert {m: found for m, found in changes.items() if m not in MAY_CHANGE_FILES} == {}
    assert MAY_CHANGE_FILES.keys() == changes.keys()
