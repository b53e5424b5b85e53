"""The migration guides name every argument of the library that readers come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "how-to"

# A page, and the arguments of what its readers call today, in the version that was looked at.
CALLS = {
    "from-torch": (  # torch.utils.data.DataLoader 2.13
        "dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory "
        "drop_last timeout worker_init_fn multiprocessing_context generator prefetch_factor "
        "persistent_workers pin_memory_device in_order"
    ),
    "from-ffcv": (  # ffcv.loader.Loader 1.0.2
        "fname batch_size num_workers os_cache order distributed seed indices pipelines "
        "custom_fields drop_last batches_ahead recompile"
    ),
    "from-spdl": (  # spdl.dataloader.DataLoader 0.8.0
        "src preprocessor batch_size drop_last aggregator transfer_fn buffer_size num_threads "
        "timeout output_order"
    ),
    # webdataset.multi.MultiLoader 1.0.2
    "from-webdataset": "dataset workers verbose nokill prefix",
    # tinyloader.loader.load_with_workers 0.1.5
    "from-tinyloader": "loader items num_worker shared_memory_enabled memory_pool_block_count",
}


def _rows_of(page: str) -> set[str]:
    """Return each name in code from the first column of a page's tables."""
    text = (GUIDES / f"{page}.md").read_text("utf-8")
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    code = [piece for cell in cells for piece in re.findall(r"`([^`]*)`", cell)]
    return {word for piece in code for word in re.findall(r"\w+", piece)}


@pytest.mark.parametrize("page", sorted(CALLS))
def test_a_guide_has_a_row_for_every_argument(page: str) -> None:
    assert set(CALLS[page].split()) - _rows_of(page) == set()
