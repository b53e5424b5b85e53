"""Check this machine: versions, extras, limits and GPUs.

A package that is missing or too old, or a missing feature of the kernel, is a problem: the exit
code is then 3. Advice about low limits does not change the exit code. Each framework is imported in
a separate process, to list its devices.

Examples:
    shardio doctor
    shardio doctor --json > machine.json          # to send with a question
"""

from __future__ import annotations

import argparse
import operator
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final

import zstandard

import shardio
from shardio._base.progress import format_size
from shardio.errors import install_hint
from shardio.measuring import MachineLimits, machine_limits
from shardio.media import library_versions
from shardio_tools.arguments import add_output_arguments
from shardio_tools.output import escaped, format_count, print_error, print_json, print_screen
from shardio_tools.screen import Cell, Done, Element, Table, facts

EXTRAS: Final = {
    "images": "pictures, contact sheets",
    "view": "a dataset in the browser",
    "torch": "tensors of PyTorch",
    "jax": "arrays of JAX",
    "remote": "object stores",
    "ray": "clusters",
    "zmq": "decoding on other machines",
    "arrow": "Parquet, Arrow, Hugging Face",
    "hdf5": "HDF5",
    "zarr": "Zarr",
    "tfrecord": "TFRecord",
    "arrayrecord": "ArrayRecord",
}
"""The extras of shardio and their purposes."""
PROBES: Final = {
    "tinygrad": "from tinygrad import Device, Tensor; (Tensor([1.0]) + 1).tolist(); "
    "print('default device', Device.DEFAULT)",
    "torch": "import torch; n = torch.cuda.device_count(); n and torch.ones(1, device='cuda'); "
    "print(f'CUDA {torch.version.cuda}, {n} visible GPUs' if torch.version.cuda else "
    "'built without CUDA')",
}
"""Programs that print the devices that a framework sees; each is run in another process."""
_PROBE_S: Final = 60.0
"""The maximum duration of one of PROBES, in seconds."""
_FAILS: Final = "fails: "
_JAX_PLUGINS: Final = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")
_LOW_FILES: Final = 1024
_LOW_MAPS: Final = 65_530
_LOW_MEMORY: Final = 1 << 30
_LOW_SHM: Final = 256 << 20
"""The limits below which there is advice: numbers of files and of memory maps, sizes in bytes."""
_REQUIREMENT: Final = re.compile(
    r"([\w.-]+)(?:\[[\w,]+\])?\s*([^;]*)(?:;.*extra == ['\"](\w+)['\"])?"
)
_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
LABEL_WIDTH: Final = 13
"""The number of columns of the labels, which are aligned over all tables of the report."""


@dataclass
class Package:
    """A package that shardio needs: its name, the versions that fit, and the version found."""

    name: str
    needs: str
    found: str | None

    @property
    def is_fit(self) -> bool:
        """True if the package is installed in one of the versions that shardio needs."""
        return self.found is not None and satisfies(self.found, self.needs)


@dataclass
class Diagnosis:
    """The facts about this machine, advice, and problems that keep shardio from working."""

    packages: list[Package]
    extras: dict[str, list[Package]]
    limits: MachineLimits
    shared_memory: tuple[int, int] | None
    """The size of /dev/shm and its free space, in bytes; None if there is no /dev/shm."""
    gpus: dict[str, str]
    """The GPUs of the machine, and the devices that each framework sees."""
    notes: dict[str, str]
    """The versions of the libraries in some packages."""
    advice: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        packages = {
            one.name: asdict(one) | {"is_fit": one.is_fit, "note": self.notes.get(one.name)}
            for one in self.packages
        }
        extras = {
            name: {
                "purpose": EXTRAS[name],
                "packages": {one.name: one.found for one in members},
                "is_installed": all(one.is_fit for one in members),
            }
            for name, members in self.extras.items()
        }
        return {
            "shardio": shardio.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": packages,
            "extras": extras,
            "limits": asdict(self.limits),
            "shared_memory_bytes": None if self.shared_memory is None else self.shared_memory[0],
            "gpus": self.gpus,
            "advice": self.advice,
            "problems": self.problems,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add_output_arguments(parser.add_argument, "print problems only", "print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Examine the machine, report, and return the exit code."""
    found = diagnose()
    if options.json:
        print_json(found.as_json())
    elif options.quiet:
        for text in found.problems:
            print_error(escaped(text))
    else:
        print_screen(describe(found))
    return 3 if found.problems else 0


def diagnose() -> Diagnosis:
    """Examine this machine."""
    packages, extras = required_packages()
    found = Diagnosis(packages, extras, machine_limits(), shared_memory(), gpus(), library_notes())
    found.problems += [_package_problem(one) for one in packages if not one.is_fit]
    found.problems += found.limits.missing
    found.problems += [f"{name} {note}" for name, note in found.notes.items() if _FAILS in note]
    found.advice += _advice(found)
    return found


def required_packages() -> tuple[list[Package], dict[str, list[Package]]]:
    """Return the packages that shardio always requires, and those that each extra requires.

    Both come from the metadata of the installed package, and are empty if shardio is not installed
    but runs from a folder.
    """
    core: list[Package] = []
    extras: dict[str, list[Package]] = {name: [] for name in EXTRAS}
    try:
        lines = requires("shardio-loader") or []
    except PackageNotFoundError:
        return [], {}
    for line in lines:
        if (parts := _REQUIREMENT.match(line)) is None:
            continue
        name, needs, extra = parts.groups()
        package = Package(name, needs.strip(" ()"), found_version(name))
        if extra is None:
            core.append(package)
        elif extra in extras:
            extras[extra].append(package)
    return core, extras


def found_version(name: str) -> str | None:
    """Return the version of an installed package, without importing it; None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def satisfies(found: str, needs: str) -> bool:
    """Return True if a version fulfils requirements such as ">=17,<19"."""
    bounds = re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", needs)
    return all(_COMPARISONS[sign](_numbers(found), _numbers(bound)) for sign, bound in bounds)


def _numbers(text: str) -> list[int]:
    """Return the leading numbers of a version, without zeros at the end."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [*map(int, found[0].split("."))] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def shared_memory(path: str = "/dev/shm") -> tuple[int, int] | None:
    """Return the size and the free space of the file system of shared memory, in bytes."""
    try:
        state = os.statvfs(path)
    except OSError:
        return None
    return state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail


def gpus() -> dict[str, str]:
    """Return the GPUs that the kernel shows, and the devices that each framework sees."""
    names = [name for name in PROBES if found_version(name) is not None]
    with ThreadPoolExecutor() as pool:
        answers = dict(zip(names, pool.map(lambda name: probe(PROBES[name]), names), strict=True))
    found = {"GPUs": ", ".join(visible_gpus()) or "none"}
    for name in PROBES:
        known = found_version(name)
        found[name] = f"{known}, {answers[name]}" if known else "not installed"
    jax, plugins = found_version("jax"), [*filter(found_version, _JAX_PLUGINS)]
    found["jax"] = f"{jax}, {', '.join(plugins) or 'CPU only'}" if jax else "not installed"
    return found


def visible_gpus(root: str = "/") -> list[str]:
    """Return the names of the GPUs whose drivers are loaded."""
    found = []
    for path in sorted(Path(root).glob("proc/driver/nvidia/gpus/*/information")):
        text = path.read_text("utf-8", "replace") if os.access(path, os.R_OK) else ""
        model = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        found.append(model[1].strip() if model else "NVIDIA")
    found = found or ["NVIDIA" for _ in Path(root).glob("dev/nvidia[0-9]*")]
    return found + ["AMD" for _ in Path(root).glob("dev/kfd")]


def probe(code: str) -> str:
    """Run a program in another interpreter; return its last line, or the last line of its error."""
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_FAILS}{error}"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode}"
    return last if done.returncode == 0 else f"{_FAILS}{last}"


def library_notes() -> dict[str, str]:
    """Return the versions of the C libraries in packages, or the errors of importing them."""
    try:
        ffmpeg = f"FFmpeg's libavcodec {library_versions()['libavcodec']}"
    except (ImportError, OSError) as error:
        ffmpeg = f"{_FAILS}{error}"
    return {"av": ffmpeg, "zstandard": f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"}


def _package_problem(one: Package) -> str:
    found = "not installed" if one.found is None else f"version {one.found}"
    wanted = f"{one.name}{one.needs}"
    return f"{one.name}: {found}; shardio needs {wanted}: pip install '{wanted}'"


def _advice(found: Diagnosis) -> Iterator[str]:
    limits = found.limits
    if not found.packages:
        yield "shardio runs from a folder, so packages are not checked: pip install . there"
    for name, members in found.extras.items():
        for one in members:
            if one.found is not None and not one.is_fit:
                yield f"{one.name} {one.found} does not fit ({one.needs}): {install_hint(name)}"
    if limits.memory_bytes < _LOW_MEMORY:
        yield f"little memory is free ({limits.memory_limit}): use small batches and few workers"
    if limits.max_open_files is not None and limits.max_open_files < _LOW_FILES:
        hard_limit = limits.max_raised_open_files
        can_raise = hard_limit is None or hard_limit > limits.max_open_files
        n = min(65_536, hard_limit or 65_536)
        how = (
            f"run `ulimit -n {n}` first"
            if can_raise
            else "ask for a higher hard limit (`ulimit -Hn`)"
        )
        yield f"few files may be open, which limits blocks and shards: {how}"
    if limits.max_maps < _LOW_MAPS:
        yield "few memory maps are allowed: as root, `sysctl -w vm.max_map_count=262144`"
    if found.shared_memory is not None and found.shared_memory[0] < _LOW_SHM:
        yield (
            "/dev/shm is small; shardio does not use it, but torch's DataLoader does: start the "
            "container with --shm-size=8g"
        )
    if "NVIDIA" in found.gpus["GPUs"] and found.gpus["torch"].endswith(", 0 visible GPUs"):
        yield (
            "torch sees no GPU: its version of CUDA may need a newer driver (nvidia-smi shows the "
            "version), or CUDA_VISIBLE_DEVICES hides the GPUs"
        )
    for name in (name for name, text in found.gpus.items() if _FAILS in text):
        if name != "tinygrad" or shutil.which("clang"):
            yield f"{name} and output={name!r} do not work here: see the line of {name} above"
            continue
        yield (
            "tinygrad has no device here: on the CPU it needs clang (apt-get install "
            "--no-install-recommends clang); output='numpy', 'torch' and 'jax' do not need it"
        )


def describe(found: Diagnosis) -> Iterator[Element]:
    """Yield the elements of the report."""
    yield _facts(_versions(found))
    yield ""
    yield _facts(_limits(found))
    yield ""
    yield _facts([(name, escaped(text)) for name, text in found.gpus.items()])
    if found.problems or found.advice:
        yield ""
    for text in found.problems:
        yield Cell(f"problem: {escaped(text)}", "bad")
    for text in found.advice:
        yield Cell(f"advice: {escaped(text)}", "warning")
    if found.problems:
        yield Done(f"checked this machine: {format_count(len(found.problems), 'problem')}", "bad")
    elif found.advice:
        n = format_count(len(found.advice), "piece of advice", "pieces of advice")
        yield Done(f"checked this machine: shardio works here; {n}", "warning")
    else:
        yield Done("checked this machine: everything is fine")


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    return facts([f"{label:<{LABEL_WIDTH}}", text] for label, text in rows)


def _versions(found: Diagnosis) -> Iterator[tuple[str, str]]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "shardio", f"{shardio.__version__}, Python {platform.python_version()}, {system}"
    texts = []
    for one in found.packages:
        note = f" ({found.notes[one.name]})" if one.name in found.notes else ""
        texts.append(f"{one.name} {one.found or 'missing'}{note}")
    yield "packages", ", ".join(texts) or "unknown"
    has = {name: all(one.is_fit for one in members) for name, members in found.extras.items()}
    if found.extras:
        yield "extras", ", ".join(name for name in has if has[name]) or "none"
    if lacking := [name for name in has if not has[name]]:
        yield "not installed", ", ".join(f"{name} ({EXTRAS[name]})" for name in lacking)
        yield "", f"→ {install_hint(','.join(lacking))}"


def _limits(found: Diagnosis) -> Iterator[tuple[str, str]]:
    limits = found.limits
    quota = "" if limits.quota_cpus is None else f" (a quota allows {limits.quota_cpus})"
    yield "CPUs", f"{limits.n_usable_cpus} usable of {limits.n_cpus}{quota}"
    yield "memory", f"{format_size(limits.memory_bytes)} free: {limits.memory_limit}"
    soft, hard = (
        "no limit" if n is None else f"{n:,}"
        for n in (limits.max_open_files, limits.max_raised_open_files)
    )
    yield "open files", soft if soft == hard else f"{soft} (can be raised to {hard})"
    yield "memory maps", f"{limits.max_maps:,}"
    if found.shared_memory is not None:
        total, free = map(format_size, found.shared_memory)
        yield "/dev/shm", f"{total}, {free} free (not used: shardio shares memory by memfd)"
    yield "start methods", "thread" if limits.missing else "zygote (default), spawn, thread"
