"""Public objects show themselves in one line that says what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardio import (
    DatasetWriter,
    MultiLoader,
    Schema,
    ShardDataset,
    ShardLoader,
    ShardReader,
    ShardWriter,
    WeightedSampler,
    conversion,
    maintenance,
)
from shardio._base.statistics import DatasetStats, ItemStats, LoaderStats, LoadingStats, StageStats
from shardio.format import types
from shardio.map_view import MapView
from shardio.measuring.measure import Conclusion, Limit, LoadingReport, LoadingRun
from tests.loading import TWO_FIELDS, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "set", 30, 1, TWO_FIELDS, two_fields(30))


def test_a_loader_also_when_it_is_closed(folder: str) -> None:
    with ShardLoader(folder, 4, output="numpy", num_workers=0) as loader:
        shown = f"ShardLoader({folder!r}: 30 samples in batches of 4, 0 workers)"
        assert repr(loader) == shown
        for _ in range(2):
            list(loader)
        batches = iter(loader)
        next(batches)
        assert repr(batches) == "LoaderIterator(epoch 2: next batch 1 of 8)"
        list(batches)
        assert repr(batches) == "LoaderIterator(epoch 2: over)"
        assert repr(loader) == shown.replace(")", ", epoch 2)")
        assert "closed" not in repr(loader.view) + loader._repr_html_()
    assert repr(loader) == shown.replace(")", ", epoch 2, closed)")
    assert repr(loader.view).endswith("generation 1, closed))")
    things: list[Any] = [loader, loader.view, loader.dataset]
    for thing in things:
        assert " · closed" in thing._repr_html_()


def test_a_loader_whose_sampler_is_a_function_does_not_call_it(folder: str) -> None:
    asked: list[int] = []

    def sampler(epoch: int) -> list[int]:
        asked.append(epoch)
        return [epoch]

    with ShardLoader(folder, 4, output="numpy", num_workers=0, sampler=sampler) as loader:
        before = list(asked)
        assert "30 samples" in repr(loader)
        assert asked == before


def test_a_weighted_sampler() -> None:
    shown = repr(WeightedSampler([1, 2], n_draws=9))
    assert shown == "WeightedSampler(2 weights, replacement=True, n_draws=9)"


def test_writers_and_a_reader(folder: str, tmp_path: Path) -> None:
    sample = next(iter(two_fields(1)))
    path = tmp_path / "a.shard"
    with ShardWriter(path, TWO_FIELDS) as writer:
        writer.append(sample)
        assert repr(writer) == f"ShardWriter({str(path)!r}: 1 samples so far)"
    with ShardReader(path) as reader:
        assert repr(reader) == f"ShardReader({str(path)!r}: 1 samples of 2 fields)"
    assert repr(writer) == f"ShardWriter({str(path)!r}: 1 samples, closed)"
    assert repr(reader) == f"ShardReader({str(path)!r}: 1 samples of 2 fields, closed)"
    out = tmp_path / "new"
    with DatasetWriter(out, TWO_FIELDS, shard_bytes=4096) as made:
        for _ in range(3):
            made.append(sample)
        assert repr(made) == f"DatasetWriter({str(out)!r}: 3 samples so far)"
    assert repr(made) == f"DatasetWriter({str(out)!r}: 3 samples, closed)"


def test_views_and_the_loaders_of_other_libraries(folder: str) -> None:
    view = MapView(folder)
    assert repr(view) == f"MapView({folder!r}: 30 samples)"
    assert "closed" not in view._repr_html_()
    view.close()
    assert repr(view) == f"MapView({folder!r}: 30 samples, closed)"
    assert " · closed" in view._repr_html_()
    assert repr(MultiLoader(range(3), 2)) == "MultiLoader(range, workers=2)"


def test_the_statistics_of_a_dataset(folder: str) -> None:
    maintenance.compute_stats(folder)
    with ShardDataset(folder) as dataset:
        assert repr(dataset.stats) == "DatasetStats(30 samples, fields image, label)"
        assert dataset.stats["whole"]["fields"]["label"]["count"] == 30


def test_reports_and_statistics_are_bounded() -> None:
    source = conversion.InputReport("a.mp4", "broken", "why", 0, 9)
    finding = maintenance.Finding("a.shard", "hash", "wrong")
    half = maintenance.ShardRepair("a.shard", 7, losses=[maintenance.Loss(7, 9, "why")])
    path, stats = Path("a/" * 999), LoadingStats(2.0, 1.0, n_samples=3000)
    fields = dict.fromkeys(map(str, range(999)), 7)
    run, conclusion = LoadingRun(4, stats, stats, 1, 1, 1), Conclusion(Limit.COPY, "why", ())
    report = LoadingReport(str(path), 9, 8, 2, None, (run,), conclusion, conclusion)
    for value, shown in (
        (conversion.ConversionReport(path, "x", 1, 9, 2, (source,) * 20_000), "20,000 broken)"),
        (conversion.ConversionReport("a", "x", 0, 0, 2, generation=0), "nothing published, 2.0 s)"),
        (maintenance.VerificationReport("a", 1, "", 2, 1, 0, (finding,) * 999, ()), "999 findings"),
        (maintenance.RepairReport("a", path, 7, (half,) * 2000), "6,000 lost, 2,000 damaged sh"),
        (half, "ShardRepair('a.shard': damaged, 7 kept, 3 lost)"),
        (
            maintenance.DiffReport("a", "b", 8, 8, ["x"]),
            "different, 8 samples each, 1 different field)",
        ),
        (maintenance.DiffReport("a", "b", 24, 8), "same, 24 and 8 samples)"),
        (
            maintenance.StatsReport(path, 2, "val", {"samples": 3, "fields": fields}),
            "reopen the dataset for dataset.stats, 3 samples)",
        ),
        (
            DatasetStats(
                whole={"samples": 9, "fields": fields}, subsets={"val": {"samples": 1_234}}
            ),
            "DatasetStats(9 samples, subset 'val' 1,234 samples, fields 0, 1, 2, 3, ",
        ),
        (DatasetStats(), "DatasetStats(no statistics: shardio.maintenance.compute_stats(path) com"),
        (maintenance.SplitReport(path, 2, fields, {}), "'0' 7, '1' 7, "),
        (LoaderStats(3, 2, stats, stats), "(epoch 3, 3,000 samples at 1,500/s, 0 skipped, wait"),
        (finding, "Finding('a.shard': hash, wrong)"),
        (
            maintenance.Finding(path.as_posix(), "sum", "w" * 999, field="x", sample=0),
            "sum, field 'x', …)",
        ),
        (ItemStats(n_put=7, n_taken=1), "ItemStats(0 s in the function, 7 put, 1 taken)"),
        (
            StageStats("decode", 2, 5, 4, 1, 0, 0.5, 1.0, 2.0),
            "(decode, 0.5 s in the function, 5 in",
        ),
        (run, "LoadingRun(1,500 samples/s, 0.00 GB/s, 4 workers)"),
        (report, "1,500 samples/s with 4 workers, why, 9 samples, 2 cpus)"),
        (Schema(dict.fromkeys(fields, types.Text())), "Schema({'0': Text(), '1': Text(), "),
    ):
        assert shown in repr(value) and len(repr(value)) <= 200


def test_a_schema_shows_itself_as_it_is_typed() -> None:
    text = "{'f': Video(), 'x': List(Array('int8', (None,))), 't': Text(codec='zstd')}"
    assert repr(Schema(eval(text, vars(types)))) == f"Schema({text})"
