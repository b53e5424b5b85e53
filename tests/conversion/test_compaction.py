"""Small shards of a conversion of items are merged before publishing."""

from __future__ import annotations

import os
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardio
from shardio import ShardWriter
from shardio.conversion import execution
from shardio.conversion.execution import group_small
from shardio.maintenance import verify_dataset
from tests.lines import column, contents
from tests.shards import EVERY_FIELD, every_field_sample, samples

pytestmark = pytest.mark.usefixtures("warm_zygote")


def number(n: int, size: int = 300) -> dict[str, Any]:
    return {"x": np.full(size, n % 256, np.uint8), "n": n}


def shards_of(out: Path) -> list[Path]:
    with shardio.open(out) as dataset:
        return [out / shard.name for shard in dataset.shards]


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 12))
def test_groups_cover_all_in_order_and_end_once_full(sizes: list[int], least: int) -> None:
    groups = group_small(sizes, least)
    assert [k for group in groups for k in group] == list(range(len(sizes)))
    for group, after in zip_longest(groups, groups[1:]):
        members = [sizes[k] for k in group]
        assert sum(members[:-1]) < least or len(members) == 1
        if len(members) > 1:
            assert max(members) < least
        if after is not None and sum(members) < least:
            assert sizes[after.start] >= least


def test_small_samples_make_one_shard_for_any_number_of_workers(tmp_path: Path) -> None:
    found = []
    for n_workers in (0, 1, 2):
        out = tmp_path / str(n_workers)
        report = shardio.convert(range(200), out, samples=number, workers=n_workers)
        found.append(contents(out))
        assert [path.name for path in shards_of(out)] == ["000000-000.shard"]
        assert report.n_bytes == shards_of(out)[0].stat().st_size < 200_000
        assert sorted(os.listdir(out)) == ["000000-000.shard", "dataset.json", "generations"]
    assert found[0] == found[1] == found[2]
    assert column(tmp_path / "0", "n") == list(range(200))
    assert verify_dataset(tmp_path / "0", workers=0).findings == ()


@pytest.mark.parametrize("shard_bytes", [256 << 20, 150_000])
def test_shard_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int) -> None:
    monkeypatch.setattr(execution, "MIN_SHARD_BYTES", 200_000)

    def varying(n: int) -> dict[str, Any]:
        return {"n": n, "x": bytes([n]) * (250_000 if 30 <= n < 34 else 20_000)}

    out = tmp_path / "out"
    shardio.convert(range(64), out, samples=varying, workers=0, shard_bytes=shard_bytes)
    assert column(out, "n") == list(range(64))
    sizes = [path.stat().st_size for path in shards_of(out)]
    least = min(200_000, shard_bytes // 2)
    assert len(sizes) < 30 and sum(size < least for size in sizes) <= 2
    small = [size for size in sizes if size < 250_000]
    assert max(small) < 2 * least + 60_000


def test_a_merged_shard_equals_that_of_one_writer(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardio.convert(range(130), out, samples=every_field_sample, schema=EVERY_FIELD, workers=0)
    with shardio.DatasetWriter(tmp_path / "whole", EVERY_FIELD) as writer:
        for sample in samples(130):
            writer.append(sample)
    (made,), (whole,) = shards_of(out), shards_of(tmp_path / "whole")
    assert made.read_bytes() == whole.read_bytes()


def test_an_append_merges_only_its_own_shards(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardio.convert(range(100), out, samples=number, workers=0)
    before = {path: path.read_bytes() for path in shards_of(out)}
    report = shardio.convert(range(300), out, samples=number, workers=1, append=True)
    assert (report.n_samples, report.n_samples_before, report.generation) == (200, 100, 2)
    (old, new) = shards_of(out)
    assert before == {old: old.read_bytes()} and report.n_bytes == new.stat().st_size
    assert column(out, "n") == list(range(300))


def test_an_interrupted_merge_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def make(n: int) -> dict[str, Any]:
        calls.append(n)
        return number(n)

    shardio.convert(range(200), tmp_path / "whole", samples=make, workers=0)
    out, close = tmp_path / "out", ShardWriter.close
    for where in ("before", "after"):

        def interrupted(self: Any, where: str = where) -> Any:
            if execution.COMPACTED in self.path:
                if where == "after":
                    close(self)
                raise KeyboardInterrupt
            return close(self)

        with monkeypatch.context() as patch:
            patch.setattr(ShardWriter, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                shardio.convert(range(200), out, samples=make, workers=0, resume=True)
        assert os.listdir(out) == [".conversion"]
    calls.clear()
    shardio.convert(range(200), out, samples=make, workers=0, resume=True)
    assert calls == [0]  # for the schema
    assert contents(out) == contents(tmp_path / "whole")
