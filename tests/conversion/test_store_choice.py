"""The choice of a store is a function of its estimated size and speed, and of the limits."""

from __future__ import annotations

import pytest

from shardio import InvalidArgument
from shardio.conversion import StoreChoice, StoreEstimate, choose_store

RAW = StoreEstimate("raw", 80_000, 4000.0, "it is exact")
PLANES = StoreEstimate("planes", 20_000, 800.0)
H264 = StoreEstimate("h264", 1_000, 600.0, "it is lossy")
PACKETS = StoreEstimate("packets", 6_000, 20.0)
ALL = (RAW, PLANES, H264, PACKETS)


def choose(
    *estimates: StoreEstimate, disk: int | None = None, rate: float | None = None, n_cores: int = 1
) -> StoreChoice:
    return choose_store(estimates, disk=disk, rate=rate, n_cores=n_cores, basis="clips")


@pytest.mark.parametrize(
    ("rate", "n_cores", "store"),
    [
        (1, 1, "h264"),
        (600, 1, "h264"),
        (601, 1, "planes"),
        (801, 1, "raw"),
        (1200, 2, "h264"),
        (1201, 2, "planes"),
        (0.5, 64, "h264"),
    ],
)
def test_with_a_rate_it_is_the_smallest_store_that_reaches_it(
    rate: float, n_cores: int, store: str
) -> None:
    assert choose(*ALL, rate=rate, n_cores=n_cores).store == store


@pytest.mark.parametrize(
    ("disk", "store"),
    [(10**9, "raw"), (80_000, "raw"), (79_999, "planes"), (19_999, "h264"), (1_000, "h264")],
)
def test_without_a_rate_it_is_the_fastest_store_that_fits(disk: int, store: str) -> None:
    assert choose(*ALL, disk=disk).store == store


def test_without_limits_it_is_the_fastest() -> None:
    found = choose(*ALL)
    assert (found.store, found.reason) == ("raw", "raw is the fastest store; it is exact")


def test_with_both_limits_the_smallest_that_reaches_the_rate_must_fit() -> None:
    found = choose(*ALL, disk=40_000, rate=700)
    assert found.store == "planes"
    assert found.basis == "clips"
    assert [(one.store, one.problem) for one in found.estimates] == [
        ("raw", "too large"),
        ("planes", ""),
        ("h264", "too slow"),
        ("packets", "too slow"),
    ]


def test_the_reason_names_the_limits_and_the_loss() -> None:
    found = choose(*ALL, disk=3 << 20, rate=2500, n_cores=8)
    assert found.reason == (
        "h264 is the smallest store that takes at most 3.0 MiB and decodes 2,500 clips per second "
        "on 8 cores; it is lossy"
    )
    assert "decodes 1 clip per second on 1 core; " in choose(H264, rate=1.0).reason
    assert choose(H264, rate=0.5).reason.startswith(
        "h264 is the smallest store that decodes 0.5 clips per second on 1 core; "
    )


def test_ties() -> None:
    """Of two stores of one size the faster is chosen, of equal ones the first."""
    slow, fast = StoreEstimate("a", 10, 50.0), StoreEstimate("b", 10, 60.0)
    small, again = StoreEstimate("c", 9, 60.0), StoreEstimate("d", 9, 60.0)
    assert choose(slow, fast, rate=1).store == "b"
    assert choose(fast, small, disk=100).store == "c"
    assert choose(small, again, rate=1).store == "c"
    assert choose(again, small, disk=100).store == "d"


def test_a_store_with_a_problem_is_never_chosen() -> None:
    refused = StoreEstimate("packets", 0, 0.0, problem="not measured: a.mp4: two clocks")
    found = choose(refused, H264, rate=1)
    assert found.store == "h264"
    assert found.estimates[0] == refused


@pytest.mark.parametrize(
    ("disk", "rate", "limits"),
    [
        (999, None, "takes at most 999 bytes;"),
        (None, 9000.0, "decodes 9,000 clips per second on 2 cores;"),
        (30_000, 5000.0, "takes at most 29.3 KiB and decodes 5,000 clips per second on 2 cores;"),
    ],
)
def test_an_error_lists_what_each_store_misses(
    disk: int | None, rate: float | None, limits: str
) -> None:
    refused = StoreEstimate("jpeg", 0, 0.0, problem="not measured: a.mp4: broken")
    with pytest.raises(InvalidArgument) as caught:
        choose(*ALL, refused, disk=disk, rate=rate, n_cores=2)
    assert f"store='auto' (--store auto): no store {limits}" in str(caught.value)
    first, *notes = caught.value.__notes__
    assert first == "estimates for clips:"
    assert [note.partition(":")[0] for note in notes] == [*(one.store for one in ALL), "jpeg"]
    assert all("; too " in note for note in notes[:4])
    assert notes[4] == "jpeg: not measured: a.mp4: broken"


def test_the_notes_of_the_error_have_the_figures() -> None:
    with pytest.raises(InvalidArgument) as caught:
        choose(*ALL, disk=30_000, rate=5000)
    assert caught.value.__notes__[1:3] == [
        "raw: 78.1 KiB, 4,000 clips/s per core; too large and too slow",
        "planes: 19.5 KiB, 800 clips/s per core; too slow",
    ]
