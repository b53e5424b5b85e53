"""The limit of a loader: conclusions from made-up figures, and the form of measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument
from shardio._base.statistics import LoadingStats
from shardio.measuring.measure import Figures, Limit, cached_share, conclude, measure_loading
from tests.loading import TWO_FIELDS, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("quick_disk")

GB = 10**9


def figures(
    *,
    n_workers: int = 2,
    main_cpu_s: float = 1.0,
    n_cpus: int = 2,
    verify: str = "first",
    cached_share: float | None = None,
    worker_counts: tuple[int, ...] = (),
    **stats: Any,
) -> Figures:
    """Ten seconds of 10,000 batches of 1 MB, for which two workers were busy all the time."""
    made = {
        "elapsed_s": 10.0,
        "waiting_s": 9.0,
        "hand_over_s": 0.9,
        "filling_s": 19.0,
        "n_batches": 10_000,
        "n_samples": 320_000,
        "n_bytes": 10 * GB,
    }
    return Figures(
        LoadingStats(**made | stats),
        n_workers,
        n_cpus,
        main_cpu_s,
        10 * GB,
        verify,
        cached_share,
        worker_counts,
    )


LIMITS = {
    "body": (figures(waiting_s=0.5, hand_over_s=0.5), Limit.READING, "filling batches"),
    "copy": (figures(n_bytes=80 * GB), Limit.COPY, "8.00 GB/s, 80% of"),
    "main": (
        figures(filling_s=2.0, main_cpu_s=9.5),
        Limit.MAIN,
        "busy 95% of the time: 950 µs for each batch of 1,000 KB",
    ),
    "reading": (figures(), Limit.READING, "busy filling batches 95%"),
    "storage": (
        figures(cached_share=0.25),
        Limit.STORAGE,
        "75% of the files was not in the page cache",
    ),
    "cached": (figures(cached_share=1.0), Limit.READING, "reading 100%"),
    "hashing": (figures(checking_s=12.0), Limit.HASHING, "hashing 63%"),
    "decoding": (figures(decoding_s=12.0, cached_share=0.25), Limit.DECODING, "decoding 63%"),
    "transform": (figures(transforming_s=18.0), Limit.TRANSFORM, "the transform 95%"),
    "no-workers": (
        figures(n_workers=0, filling_s=8.0, main_cpu_s=9.9, transforming_s=7.0),
        Limit.TRANSFORM,
        "without workers, the main process is busy",
    ),
    "nobody": (figures(filling_s=4.0, main_cpu_s=3.0), Limit.ROUND_TRIPS, "20% of the"),
}


@pytest.mark.parametrize(("made", "limit", "because"), LIMITS.values(), ids=LIMITS)
def test_what_is_busy_is_what_limits(made: Figures, limit: Limit, because: str) -> None:
    found = conclude(made)
    assert found.limit is limit
    assert because in found.because
    assert found.advice


ADVICE = {
    "more workers": (figures(n_cpus=8, transforming_s=18.0), "num_workers=8"),
    "batch": (figures(filling_s=2.0, main_cpu_s=9.5), "a larger batch_size"),
    "reuse": (figures(filling_s=2.0, main_cpu_s=9.5), "reuse=True"),
    "verify": (figures(checking_s=12.0, verify="always"), 'verify="first"'),
    "prefetch": (figures(filling_s=4.0, main_cpu_s=3.0), "a larger prefetch"),
    "fewer": (figures(filling_s=4.0, main_cpu_s=3.0, n_workers=4), "num_workers=2"),
    "small batches": (figures(n_bytes=GB // 10), "a larger batch_size"),
    "fewer fields": (figures(), "fields"),
    "raw": (figures(decoding_s=12.0), "raw"),
    "blocks": (figures(cached_share=0.1), "shuffle='blocks'"),
    "preload": (replace(figures(cached_share=0.1), fits_in_memory=True), "preload"),
}


@pytest.mark.parametrize(("made", "advised"), ADVICE.values(), ids=ADVICE)
def test_the_knob_that_helps_is_named(made: Figures, advised: str) -> None:
    assert [line for line in conclude(made).advice if advised in line]


def test_preload_is_not_advised_where_it_does_not_fit() -> None:
    said = conclude(figures(cached_share=0.1)).advice
    assert not [line for line in said if "preload" in line]


@pytest.mark.parametrize("made", [figures(), figures(n_cpus=8, worker_counts=(2, 8))])
def test_workers_are_not_advised_beyond_the_cpus_or_where_they_were_no_faster(
    made: Figures,
) -> None:
    assert not [line for line in conclude(made).advice if "num_workers" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("measured")
    return write_dataset(root / "set", 100, 2, TWO_FIELDS, two_fields(100))


@pytest.mark.process
def test_every_number_of_workers_is_measured_on_the_same_samples(folder: str) -> None:
    asked: list[int] = []
    report = measure_loading(folder, 8, n_workers=[0, 1], seconds=0.05, progress=asked.append)
    assert asked == [run.n_workers for run in report.runs] == [0, 1]
    assert (report.n_samples, report.batch_size) == (100, 8)
    for run in report.runs:
        assert run.first.n_batches <= 13
        assert run.warm.n_batches % run.first.n_batches == 0
        assert run.samples_per_s > 0
        assert run.bytes_per_s == pytest.approx(run.samples_per_s * (64 * 96 + 8))
        assert run.limit_bytes_per_s > 0
    assert report.runs[0].warm.checking_s == 0  # nobody fills ahead: all of it was read before
    assert report.best.samples_per_s == max(run.samples_per_s for run in report.runs)
    assert report.trace is None


def test_options_go_to_the_loader_and_a_transform_is_measured(folder: str) -> None:
    def doubled(sample: dict[str, Any]) -> dict[str, Any]:
        return {"label": sample["label"] * 2}

    report = measure_loading(
        folder, 8, n_workers=[0], seconds=0.01, transform=doubled, fields=["label"]
    )
    warm = report.best.warm
    assert warm.transforming_s > 0
    assert warm.n_bytes == warm.n_samples * 8


def test_what_is_hashed_always_is_hashed_in_the_warm_part_too(folder: str) -> None:
    with shardio.open(folder, verify="always") as dataset:
        report = measure_loading(dataset, 8, n_workers=[0], seconds=0.01)
    assert report.best.warm.checking_s > 0


@pytest.mark.process
def test_the_fastest_run_is_traced(folder: str) -> None:
    report = measure_loading(folder, 8, n_workers=[1], seconds=0.01, wants_trace=True)
    assert report.trace is not None
    names = {event["name"] for event in report.trace.events()}
    rows = [e["args"]["name"] for e in report.trace.events() if e["name"] == "thread_name"]
    assert rows == ["main", "worker 0"]
    assert {"reading", "waiting", "ready batches"} <= names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_workers": []}, "n_workers must not be empty, and seconds"),
        ({"seconds": 0}, "n_workers must not be empty, and seconds"),
        ({"n_workers": 0}, r"such as n_workers=\[0, 4\]; found 0"),
        ({"num_workers": 2}, r"such as n_workers=\[0, 4\]; found num_workers=2"),
        ({"num_workers": [0, 1]}, r"such as n_workers=\[0, 4\]; found num_workers=\[0, 1\]"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        measure_loading(folder, **options)


def test_an_empty_dataset_cannot_be_measured(tmp_path: Path) -> None:
    empty = write_dataset(tmp_path / "set", 0, 1, TWO_FIELDS, [])
    with pytest.raises(InvalidArgument, match="no batch to measure"):
        measure_loading(empty, n_workers=[0], seconds=0.01)


def test_what_has_just_been_written_lies_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert cached_share([str(path)]) in (1.0, None)
    (tmp_path / "empty").touch()
    assert cached_share([str(tmp_path / "empty")]) is None
