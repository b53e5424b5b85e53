"""The migration guides name every argument of the library that readers come from."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "how-to"

# A page, what its readers call today, and the arguments of that in the version that was looked at.
CALLS = {
    "from-torch": (
        "torch.utils.data:DataLoader",  # 2.13
        "dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory "
        "drop_last timeout worker_init_fn multiprocessing_context generator prefetch_factor "
        "persistent_workers pin_memory_device in_order",
    ),
    "from-ffcv": (
        "ffcv.loader:Loader",  # 1.0.2
        "fname batch_size num_workers os_cache order distributed seed indices pipelines "
        "custom_fields drop_last batches_ahead recompile",
    ),
    "from-spdl": (
        "spdl.dataloader:DataLoader",  # 0.8.0
        "src preprocessor batch_size drop_last aggregator transfer_fn buffer_size num_threads "
        "timeout output_order",
    ),
    "from-webdataset": (
        "webdataset.multi:MultiLoader",  # 1.0.2
        "dataset workers verbose nokill prefix",
    ),
    "from-tinyloader": (
        "tinyloader.loader:load_with_workers",  # 0.1.5
        "loader items num_worker shared_memory_enabled memory_pool_block_count",
    ),
}


def _rows_of(page: str) -> set[str]:
    """Return each name in code from the first column of a page's tables."""
    text = (GUIDES / f"{page}.md").read_text("utf-8")
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    code = [piece for cell in cells for piece in re.findall(r"`([^`]*)`", cell)]
    return {word for piece in code for word in re.findall(r"\w+", piece)}


@pytest.mark.parametrize("page", sorted(CALLS))
def test_a_guide_has_a_row_for_every_argument(page: str) -> None:
    assert set(CALLS[page][1].split()) - _rows_of(page) == set()


@pytest.mark.external
@pytest.mark.parametrize("page", sorted(CALLS))
def test_the_arguments_are_those_of_the_original(page: str) -> None:
    place, arguments = CALLS[page]
    module, _, name = place.partition(":")
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module.partition('.')[0]} is not installed")
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    assert list(signature.parameters) == arguments.split()
