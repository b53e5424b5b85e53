"""Lists of rows: what filters find, how they are sorted and cut, and where a row is in them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from shardio import Array, DatasetWriter, Schema, Text
from shardio.maintenance import add_subset, split
from shardio_tools.view import queries, searches
from shardio_tools.view.app import ViewerState
from tests.tools.view.served import N, listed, make_dataset, rows_of, sample, viewing

SAMPLES = [sample(i) for i in range(N)]


def where(is_chosen: Callable[[dict[str, Any]], Any]) -> list[int]:
    return [i for i, each in enumerate(SAMPLES) if is_chosen(each)]


def test_without_a_filter_all_rows_are_listed_in_order(client: TestClient) -> None:
    found = listed(client, start=10, count=3)
    assert (found["n"], found["n_total"], found["progress"]) == (N, N, 1)
    assert [(row["position"], row["row"]) for row in found["rows"]] == [
        (10, 10),
        (11, 11),
        (12, 12),
    ]
    assert rows_of(client, start=58) == [58, 59]
    assert rows_of(client, start=1 << 40) == []


def test_a_row_has_title_label_text_and_a_field_with_a_picture(client: TestClient) -> None:
    (row,) = listed(client, start=4, count=1)["rows"]
    assert row["title"] == "4" and row["text"] == SAMPLES[4]["caption"]
    assert (row["label"], row["image"], row["subset"]) == (
        "<script>alert(1)</script>",
        "frames",
        None,
    )
    assert (row["damaged"], row["marked"]) == (None, False)


@pytest.mark.parametrize(
    ("params", "is_chosen"),
    [
        ({"class": "1"}, lambda s: s["label"] == 1),
        ({"class": "7"}, lambda s: False),
        ({"range": "level:2:3"}, lambda s: 2 <= s["level"] <= 3),
        ({"range": "level::1"}, lambda s: s["level"] <= 1),
        ({"range": "score:3.05:"}, lambda s: s["score"] is not None and s["score"] >= 3.05),
        ({"text": "caption:RED thing"}, lambda s: "red" in s["caption"]),
        ({"text": "caption:blue 2"}, lambda s: "Blue" in s["caption"] and "2" in s["caption"]),
        ({"text": "note:note"}, lambda s: s["note"] is not None),
        (
            {"class": "0", "range": "level:1:4", "text": "caption:blue"},
            lambda s: s["label"] == 0 and 1 <= s["level"] <= 4 and "Blue" in s["caption"],
        ),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_filter_lists_the_rows_that_meet_it(
    client: TestClient, params: dict[str, str], is_chosen: Callable[[dict[str, Any]], Any]
) -> None:
    found = listed(client, **params)
    assert [row["row"] for row in found["rows"]] == where(is_chosen)
    assert (found["n"], found["text"]) == (len(found["rows"]), "")
    for position, row in enumerate(found["rows"]):
        asked = {**params, "row": row["row"]}
        assert client.get("/api/position", params=asked).json()["position"] == position
    outside = next(i for i in range(N) if i not in where(is_chosen))
    assert client.get("/api/position", params={**params, "row": outside}).json()["position"] is None


def test_texts_are_searched_in_parts_of_bounded_size(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_TEXT_BYTES", 100)
    read: list[int] = []

    def search(dataset: Any, name: str, words: Any, rows: Any) -> Any:
        read.append(sum(len(sample(int(i))["caption"]) for i in rows))
        return _with_words(dataset, name, words, rows)

    _with_words = queries._with_words
    monkeypatch.setattr(queries, "_with_words", search)
    assert rows_of(client, text="caption:a red") == [*range(1, N, 2)]
    assert len(read) > 10 and max(read) <= 150


def test_long_texts_are_not_read_for_the_grid(tmp_path: Path) -> None:
    schema = Schema({"caption": Text(), "title": Text()})
    with DatasetWriter(tmp_path / "set", schema) as writer:
        for n in (1 << 20, (1 << 20) + 1):
            writer.append({"caption": "x" * n, "title": "t" * 300})
    with viewing(tmp_path / "set") as client:
        first, second = listed(client)["rows"]
    assert first["text"] == "x" * 199 + "…" and first["title"] == "t" * 199 + "…"
    assert second["text"] == "1,048,577 bytes of text"


def test_rows_without_texts_and_pictures_show_their_numbers(tmp_path: Path) -> None:
    schema = Schema(
        {"tokens": Array("uint16", (None,)), "label": Array("int64"), "x": Array("float32")}
    )
    with DatasetWriter(tmp_path / "set", schema) as writer:
        for n in (3, 1000):
            writer.append({"tokens": np.arange(n, dtype=np.uint16), "label": 1, "x": n / 2})
    with viewing(tmp_path / "set") as client:
        first, second = listed(client)["rows"]
        assert first["text"] == "tokens uint16 3: 0 1 2, x 1.5"
        assert second["text"].startswith("tokens uint16 1,000: 0 1 2 3 4 5")
        assert second["text"].endswith(" 15 …, x 500")


def test_words_that_are_only_spaces_are_no_filter(client: TestClient) -> None:
    assert rows_of(client, text="caption:  ") == [*range(N)]


@pytest.mark.parametrize("desc", ["0", "1"])
def test_rows_are_sorted_by_a_number_and_missing_ones_come_last(
    client: TestClient, desc: str
) -> None:
    sign = -1 if desc == "1" else 1
    known = where(lambda s: s["score"] is not None)
    wanted = sorted(known, key=lambda i: sign * float(SAMPLES[i]["score"]))
    wanted += where(lambda s: s["score"] is None)
    found = rows_of(client, sort="score", desc=desc)
    assert found == wanted
    asked: dict[str, Any] = {"sort": "score", "desc": desc, "row": found[5]}
    assert client.get("/api/position", params=asked).json()["position"] == 5


@given(keys=st.lists(st.integers(-3, 3) | st.floats(-2, 2), max_size=40))
def test_ties_stay_in_stored_order_both_ways(keys: list[float]) -> None:
    for sign in (1, -1):
        found = queries.sorting_order(np.array(keys, float), is_descending=sign < 0)
        assert found.tolist() == sorted(range(len(keys)), key=lambda i: sign * keys[i])


def test_a_subset_is_listed_without_reading_samples(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    split(folder, {"a": 0.5, "b": 0.5})
    add_subset(folder, "few", [3, 50, 51])
    for path in folder.glob("*.shard"):
        os.truncate(path, 0)
    with viewing(folder) as client:
        found = listed(client, subset="few")
        assert [row["row"] for row in found["rows"]] == [3, 50, 51]
        assert all(row["damaged"] for row in found["rows"])
        assert {row["subset"] for row in found["rows"]} <= {"a", "b"}
        for row, position in ((50, 1), (4, None)):
            asked: dict[str, Any] = {"subset": "few", "row": row}
            assert client.get("/api/position", params=asked).json()["position"] == position


def test_a_filter_may_be_limited_to_a_subset(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    add_subset(folder, "few", [3, 6, 7, 50, 51])
    with viewing(folder) as client:
        assert rows_of(client, subset="few", **{"class": "0"}) == [3, 6, 51]
        assert rows_of(client, subset="few", sort="level", desc="1") == [50, 51, 3, 6, 7]
        assert listed(client, start=6, count=1)["rows"][0]["subset"] == "few"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"class": "x"}, "class must be the index of a class"),
        ({"class": "-1"}, "class must be the index of a class"),
        ({"class": "9" * 30}, "class must be the index of a class"),
        ({"subset": "none"}, "there is no subset 'none'"),
        ({"range": "level:1"}, "range must be FIELD:LOW:HIGH"),
        ({"range": "caption:1:2"}, "range must be FIELD:LOW:HIGH"),
        ({"range": "level:a:2"}, "LOW and HIGH must be numbers"),
        ({"range": "level:nan:2"}, "LOW and HIGH must be numbers"),
        ({"text": "red"}, "text must be FIELD:WORDS"),
        ({"text": "level:3"}, "text must be FIELD:WORDS"),
        ({"text": "caption:" + "x" * 201}, "at most 200 characters"),
        ({"sort": "caption"}, "'caption' is not a field of single numbers"),
        ({"sort": "frames"}, "'frames' is not a field of single numbers"),
        ({"count": "501"}, "count must be an integer from 1 to 500"),
        ({"count": "0"}, "count must be an integer from 1 to 500"),
        ({"start": "-1"}, "start must be an integer"),
        ({"start": "9" * 40}, "start must be an integer"),
        ({"start": "٣"}, "start must be an integer"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_refused_with_what_can(
    client: TestClient, params: dict[str, str], said: str
) -> None:
    answer = client.get("/api/rows", params=params)
    assert answer.status_code == 400 and said in answer.json()["error"]


def test_matches_are_cut_at_a_limit_and_the_answer_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_MATCHES", 10)
    with viewing(folder) as client:
        found = listed(client, text="caption:red")
        assert [row["row"] for row in found["rows"]] == [*range(1, 21, 2)]
        assert found["text"] == "the first 10 rows are listed; there are more"


def test_sorting_more_than_the_limit_is_refused_with_a_way_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_MATCHES", 25)
    with viewing(folder) as client:
        answer = client.get("/api/rows", params={"sort": "level"})
        assert answer.status_code == 400
        assert "at most 25 samples are sorted in memory, and 60 match" in answer.json()["error"]
        answer = client.get("/api/rows", params={"sort": "level", "text": "caption:red"})
        while answer.status_code == 200:
            answer = client.get("/api/rows", params={"sort": "level", "text": "caption:red"})
        assert answer.status_code == 400 and "and more match" in answer.json()["error"]
        assert len(rows_of(client, sort="level", **{"class": "2"})) == 20


def test_a_shard_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    shards = sorted(folder.glob("*.shard"))
    shards[1].unlink()
    with viewing(folder) as client:
        found = listed(client, **{"class": "0"})
        assert [row["row"] for row in found["rows"]] == [*range(0, 15, 3), *range(30, 60, 3)]
        assert "1 shard could not be searched" in found["text"] and shards[1].name in found["text"]


def test_only_a_few_lists_are_kept(folder: Path) -> None:
    with ViewerState(str(folder)) as viewer:
        made = []
        for i in range(6):
            made.append(viewer.queries.get(queries.Filter(class_index=i)))
            made[-1].wait(N + 1, 60)
        again = [viewer.queries.get(queries.Filter(class_index=i)) for i in (5, 4, 3, 2, 0)]
        is_kept = [a is b for a, b in zip(again, [*made[:1:-1], made[0]], strict=True)]
        assert is_kept == [True, True, True, True, False]


def test_a_list_whose_search_was_stopped_is_searched_again(folder: Path) -> None:
    wanted = queries.Filter(class_index=1)
    with ViewerState(str(folder)) as viewer:
        stopped = viewer.queries.get(wanted)
        assert isinstance(stopped, queries.Scan)
        stopped.cancel()
        stopped.wait(N + 1, 60)
        again = viewer.queries.get(wanted)
        again.wait(N + 1, 60)
        assert (again.n, again.is_complete, again.has_failed) == (20, True, False)


@pytest.fixture
def may_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event for which searches of texts wait; SEARCHED has the words of each part."""
    event = threading.Event()

    def search(dataset: Any, name: str, words: Any, rows: Any) -> Any:
        SEARCHED.append(words)
        assert event.wait(60)
        return rows

    SEARCHED.clear()
    monkeypatch.setattr(queries, "_with_words", search)
    monkeypatch.setattr(queries, "_TEXT_BYTES", 100)
    yield event
    event.set()


SEARCHED: list[Any] = []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock of the cache of lists; its attribute `now` is the time."""
    found = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(searches, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def words(i: int) -> queries.Filter:
    return queries.Filter(words=("caption", (f"{i}",)))


def test_a_page_that_asks_for_another_list_stops_its_search_within_a_part(
    folder: Path, may_go: threading.Event
) -> None:
    with ViewerState(str(folder)) as viewer:
        scans = [viewer.queries.get(words(i), "page") for i in range(30)]
        while not SEARCHED:
            threading.Event().wait(0.01)
        for scan in scans[:-1]:
            assert isinstance(scan, queries.Scan) and scan.is_cancelled
            assert not scan.is_complete and not scan.has_failed
        assert len(SEARCHED) <= 2
        may_go.set()
        scans[-1].wait(N + 1, 60)
        assert (scans[-1].n, scans[-1].is_complete) == (N, True)
        for i in range(29):
            assert SEARCHED.count((f"{i}",)) <= 1, "a stopped search ends with the part it reads"


def test_pages_that_search_get_a_place_in_turn_and_each_search_is_completed(
    folder: Path, may_go: threading.Event, clock: SimpleNamespace
) -> None:
    with ViewerState(str(folder)) as viewer:

        def ask(pages: Sequence[int]) -> dict[int, searches.Listing]:
            return {i: viewer.queries.get(words(i), f"page {i}") for i in pages}

        first = ask(range(10))
        for _ in range(5):
            clock.now += 1.9
            assert ask(range(4)) == {i: first[i] for i in range(4)}
            for each in ask([*range(9, 3, -1)]).values():  # those that wait keep their order
                assert (each.n, each.is_complete, each.progress) == (0, False, 0)
                assert each.text == "waiting for other searches"
        may_go.set()
        for shown in (range(4), range(4, 8), range(8, 10)):
            for each in ask([*range(9, shown[0] - 1, -1)]).values():
                each.wait(N + 1, 60)
            for each in (found := ask(shown)).values():
                each.wait(N + 1, 60)
                assert (each.n, each.is_complete, each.has_failed) == (N, True, False)
            assert len({id(each) for each in found.values()}) == len(shown)
            for _ in range(3):
                clock.now += 1  # the pages that show their list ask no more
                ask(range(shown[-1] + 1, 10))


def test_a_page_in_the_background_keeps_its_search_and_a_closed_one_does_not(
    folder: Path, may_go: threading.Event, clock: SimpleNamespace
) -> None:
    with ViewerState(str(folder)) as viewer:
        scan = viewer.queries.get(words(1), "one")
        assert isinstance(scan, queries.Scan)
        clock.now += 60
        viewer.queries.get(words(2), "two")
        assert viewer.queries.get(words(1), "one") is scan
        viewer.queries.get(words(1), "three")
        viewer.queries.get(words(3), "three")
        assert not scan.is_cancelled, "page one wants it"
        clock.now += 91
        viewer.queries.get(words(2), "two")
        assert scan.is_cancelled


def test_many_names_of_pages_and_many_searches_take_bounded_memory(
    folder: Path, may_go: threading.Event
) -> None:
    with ViewerState(str(folder)) as viewer:
        for i in range(300):
            viewer.queries.get(words(0), f"page {i}")
            viewer.queries.get(words(i), f"another {i}")
        *_, entry = viewer.queries._entries.values()
        assert len(viewer.queries._entries) == 4
        assert len(viewer.queries._queue) == len(entry._pages) == 64


def test_the_name_of_a_page_is_a_parameter_of_requests(
    client: TestClient, may_go: threading.Event
) -> None:
    asked: dict[str, Any] = {"text": "caption:blue", "page": "x" * 1000}
    assert not client.get("/api/rows", params=asked).json()["complete"]
    params = {"text": "caption:red", "page": "x" * 999}  # names are cut: it is the same page
    assert not client.get("/api/position", params={**params, "row": 1}).json()["complete"]
    may_go.set()
    assert rows_of(client, **params) == [*range(N)]
    assert SEARCHED.count(("blue",)) <= 1


def test_a_range_may_be_wider_than_the_type_of_the_numbers(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", Schema({"x": Array("float16")})) as writer:
        for i in range(4):
            writer.append({"x": float(i)})
    with viewing(tmp_path / "set") as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows_of(client, range="x:1:1e9") == [1, 2, 3]
        assert rows_of(client, range="x:-1e300:2") == [0, 1, 2]
