"""The page of `shardio view` in a browser: each view, by pointer and by keys, light and dark."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.maintenance import add_subset
from shardio_tools.view.exporting import export_site
from tests.tools.view import made_sets
from tests.tools.view.browsing import CHECKS, NARROW, TIMEOUT_S, WIDE, Visits, serving, visiting

pytestmark = [pytest.mark.external, pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def visits() -> Iterator[Visits]:
    """Run a browser for this module only: while it runs, this thread has an event loop."""
    with visiting() as made:
        yield made


@pytest.fixture(autouse=True)
def _quiet(visits: Visits) -> Iterator[None]:
    """Fail a test whose pages had errors or asked other servers."""
    yield
    visits.check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def pictures(folder: Path, visits: Visits) -> Path:
    return made_sets.make_pictures(folder / "pictures", 60, height=60, hostile_row=5)


@pytest.fixture(scope="module")
def pictures_link(pictures: Path) -> Iterator[str]:
    with serving(pictures) as link:
        yield link


@pytest.fixture(scope="module")
def episodes_link(folder: Path, visits: Visits) -> Iterator[str]:
    made = made_sets.make_episodes(folder / "episodes", folder / "v", 2, n_frames=45, width=128)
    with serving(made) as link:
        yield link


@pytest.fixture(scope="module")
def mixture_link(folder: Path, visits: Visits) -> Iterator[str]:
    hevc = made_sets.write_hevc(folder / "hevc.mp4", n_frames=12)
    tone = made_sets.write_tone(folder / "tone.m4a")
    with serving(made_sets.make_mixture(folder / "mixture", hevc, tone)) as link:
        yield link


def until(page: Any, condition: str) -> None:
    """Wait until an expression, which may call the functions of checks.js, is true.

    `page.wait_for_function` would evaluate texts in the page, which its policy forbids.
    """
    end = time.monotonic() + TIMEOUT_S
    while not result(page, condition):
        assert time.monotonic() < end, f"not true in {TIMEOUT_S} s: {condition}"
        page.wait_for_timeout(20)


def result(page: Any, expression: str) -> Any:
    """Return the value of an expression, which may call the functions of checks.js."""
    return page.evaluate(f"() => {{ {CHECKS}; return {expression}; }}")


def go(page: Any, place: str) -> None:
    page.evaluate("hash => { location.hash = hash; }", place)


def hash_of(page: Any) -> str:
    found: str = page.evaluate("location.hash")
    return found


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


# --- overview ---------------------------------------------------------------------------------


def test_overview_has_fields_classes_histograms_and_history(
    visits: Visits, pictures_link: str
) -> None:
    with visits.page(pictures_link) as page:
        assert page.locator("h1").inner_text() == "pictures"
        assert texts(page, "section[aria-label=Fields] td.name") == [
            *("image", "label", "name", "caption", "brightness", "width")
        ]
        assert "samples 60" in page.locator(".facts").inner_text()
        page.wait_for_selector(".histogram >> text=brightness")
        until(page, "document.querySelectorAll('.strip img').length > 9")
        page.wait_for_selector("section[aria-label=History] tbody tr")
        counts = [int(text) for text in texts(page, "section[aria-label=Classes] .n")]
        assert sum(counts) == 60
        # Bars are reached by keys: one stop for all, arrows between them, Enter follows.
        plot = page.locator(".histogram", has_text="brightness").locator(".plot")
        plot.locator("[tabindex='0']").focus()
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        n = int(re.search(r": (\d+) value", label)[1])  # type: ignore[index]
        page.keyboard.press("Enter")
        page.wait_for_selector(".results-bar .chip")
        assert "range=brightness:" in hash_of(page)
        page.wait_for_selector(f".results-bar .n >> text={n} of 60")
        page.go_back()
        page.locator("section[aria-label=Classes] a", has_text="rings").click()
        page.wait_for_selector(f".results-bar .n >> text={counts[1]} of 60")
        assert hash_of(page).startswith("#/grid?class=1")


@pytest.fixture(scope="module")
def clips_link(videos: Path, folder: Path, visits: Visits) -> Iterator[str]:
    """Serve clips of four frames, converted with inputs that failed."""
    out = folder / "clips"
    shardio.convert(videos, out, workers=0, store="packets", frames=4, size=16)
    with serving(out) as link:
        yield link


def test_converted_clips_have_a_report_and_a_timeline(visits: Visits, clips_link: str) -> None:
    with visits.page(clips_link) as page:
        page.wait_for_selector("section[aria-label=Conversion] tbody tr")
        failed = page.locator("section[aria-label=Conversion]").inner_text()
        assert "fish/short.mp4" in failed and "one clip spans 4" in failed
        assert "clips of 4 frames" in page.locator(".facts").inner_text()
        go(page, "#/sample/0")
        page.wait_for_selector(".timeline-legend >> text=2 clips of 4 frames")
        until(page, "document.querySelector('video').readyState >= 2")
        page.keyboard.press("]")
        page.wait_for_selector(".frame >> text=frame 3 / 8")
        page.keyboard.press(".")
        page.wait_for_selector(".frame >> text=frame 4 / 8")
        page.keyboard.press("[")
        page.wait_for_selector(".frame >> text=frame 0 / 8")
        page.get_by_role("slider", name="Time").focus()
        page.keyboard.press("End")
        page.wait_for_selector(".frame >> text=frame 8 / 8")
        page.keyboard.press(" ")  # at the end, from the start
        until(page, "document.querySelector('video').currentTime < 0.3")
        until(page, "document.querySelector('video').ended")
        page.get_by_role("button", name="Loop the clip").click()
        page.get_by_role("slider", name="Time").focus()
        page.keyboard.press(" ")
        for frame in (3, 0, 3, 0):
            until(page, f"document.querySelector('.frame').textContent === 'frame {frame} / 8'")
        assert not page.evaluate("document.querySelector('video').paused")


# --- the grid ---------------------------------------------------------------------------------


def test_grid_filters_are_in_the_link_and_history(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link, "#/grid") as page:
        page.wait_for_selector(".results-bar .n >> text=60 samples")
        until(page, "[...document.querySelectorAll('.tile img')].some(i => i.naturalWidth)")
        page.keyboard.press("/")
        page.keyboard.type("waves")
        page.get_by_label("Text field to search").select_option("caption")
        until(page, "location.hash.includes('text=caption')")
        page.wait_for_selector(".results-bar .n >> text=of 60")
        page.wait_for_selector(".tile .title")
        found = texts(page, ".tile .title")
        assert found and all(text.startswith("waves-") for text in found)
        page.get_by_label("Sort by").select_option("brightness")
        until(page, "location.hash.includes('sort=brightness')")
        page.get_by_label("Ascending: sort descending").click()
        page.wait_for_selector(".chip >> text=by brightness, descending")
        until(page, f"document.querySelectorAll('.tile .title').length === {len(found)}")
        state, order = hash_of(page), texts(page, ".tile .title")
        assert sorted(order) == sorted(found)
        # The same link shows the same elsewhere; back undoes one filter after the other.
        with visits.page(pictures_link, state) as other:
            until(other, f"document.querySelectorAll('.tile .title').length === {len(order)}")
            assert texts(other, ".tile .title") == order
            assert texts(other, ".chip") == texts(page, ".chip")
        page.go_back()
        until(page, "!location.hash.includes('desc')")
        page.go_back()
        page.go_back()
        page.wait_for_selector(".results-bar .n >> text=60 samples")
        assert page.locator(".chip").count() == 0
        page.go_forward()
        page.wait_for_selector(".chip")
        go(page, "#/grid?text=name:nothing-like-this")
        page.wait_for_selector("text=No sample matches")
        page.get_by_role("button", name="Remove all filters").click()
        page.wait_for_selector(".results-bar .n >> text=60 samples")


def test_the_keys_after_a_slash_are_the_words_to_find(visits: Visits, pictures_link: str) -> None:
    """Even if they follow at once; without the focus, `v` would switch to the list."""
    slash = "new KeyboardEvent('keydown', { key: '/', bubbles: true })"
    script = f"""() => {{
        document.activeElement.dispatchEvent({slash});
        const field = document.activeElement;
        if (field.type === 'search') field.value = 'wa';
    }}"""
    for places in (["#/"], ["#/grid"], ["#/grid?text=name:rings", "#/"]):
        with visits.page(pictures_link) as page:
            for place in places:
                go(page, place)
                page.wait_for_selector(".tile .title" if "grid" in place else "h1")
            page.evaluate(script)
            page.keyboard.press("End")
            page.keyboard.type("ves")
            page.keyboard.press("Enter")
            page.wait_for_selector(".results-bar .n >> text=of 60")
            page.wait_for_selector(".tile .title")
            assert hash_of(page) == "#/grid?text=name:waves"


def test_a_search_goes_on_after_a_request_that_failed(visits: Visits, pictures_link: str) -> None:
    started = {"n": 0, "n_total": 60, "complete": False, "progress": 0.5, "rows": []}
    answers = iter([(200, started), (503, {"error": "try again"})])

    def answer(route: Any) -> None:
        status, found = next(answers, (None, None))
        if status is None:
            route.continue_()
        else:
            route.fulfill(status=status, json=found)

    with visits.page(pictures_link) as page:
        page.route("**/api/rows?*text=*", answer)
        go(page, "#/grid?text=name:waves")
        page.wait_for_selector(".toast >> text=try again")
        page.wait_for_selector(".tile .title")
        page.unroute("**/api/rows?*text=*")
    assert ["503" in each for each in visits.errors] == [True]
    visits.errors.clear()


def test_grid_by_keys_alone(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link) as page:
        focused = "document.activeElement.dataset.position"
        page.keyboard.press("g")
        page.wait_for_selector(".tile .title")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate(focused) == "1"
        style = "getComputedStyle(document.activeElement.querySelector('.picture')).boxShadow"
        assert page.evaluate(style) != "none", "the focus is not visible"
        columns = result(page, "columns()")
        page.keyboard.press("ArrowDown")
        assert page.evaluate(focused) == str(1 + columns)
        page.keyboard.press("End")
        until(page, "document.activeElement.dataset.position === '59'")
        page.keyboard.press("k")
        page.wait_for_selector("[data-position='58'] .title")
        page.keyboard.press("Enter")
        page.wait_for_selector(".sample-head >> text=59 of 60")
        assert hash_of(page).startswith("#/sample/58")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector(".sample-head >> text=58 of 60")
        page.keyboard.press("Escape")
        page.wait_for_selector("[data-position='57']")
        page.keyboard.press("v")
        page.wait_for_selector(".line .title")
        assert "view=list" in hash_of(page)
        page.keyboard.press("?")
        page.wait_for_selector("dialog[open]")
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        page.keyboard.press("r")
        page.keyboard.type("7")
        page.keyboard.press("Enter")
        until(page, "document.activeElement.dataset.position === '7'")
        page.keyboard.press("o")
        page.wait_for_selector("h1 >> text=pictures")


def test_tab_reaches_the_controls_and_shows_where_it_is(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link, "#/grid") as page:
        page.wait_for_selector(".tile .title")
        page.locator(".skip").focus()
        stops = [""]
        while 'class="tile' not in stops[-1]:
            page.keyboard.press("Tab")
            stop, is_shown = result(page, "focusStop()")
            assert is_shown, f"no sign of the focus: {stop}"
            stops.append(stop)
            assert len(stops) < 60, stops
        assert len(stops) == len(set(stops)) > 15
        for expected in ("brand", "jump", "Sort by", "Words to find", "List"):
            assert any(expected in stop for stop in stops), expected


def test_policy_refuses_other_servers(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link) as page:
        fetched = "fetch('http://127.0.0.2:1/').then(() => 'sent', () => 'refused')"
        assert page.evaluate(fetched) == "refused"
    assert visits.n_foreign == 0
    refused, visits.errors = visits.errors, []
    assert refused and all("Content Security Policy" in each for each in refused)


def test_page_without_its_token_says_what_to_do(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link) as page:
        page.context.clear_cookies()
        page.reload()
        page.wait_for_selector(".notice.bad[role=alert]")
        assert page.locator("h1").inner_text() == "The dataset cannot be shown"
        assert page.locator(".notice .hint").inner_text()
    visits.errors = [each for each in visits.errors if "status of 403" not in each]


def test_texts_are_never_html(visits: Visits, pictures_link: str, mixture_link: str) -> None:
    for link, places in (
        (pictures_link, ("#/grid", "#/grid?view=list", "#/sample/5")),
        (mixture_link, ("#/sample/1",)),
    ):
        for place in places:
            with visits.page(link, place) as page:
                page.wait_for_selector("text=<script>")
                assert page.title() not in ("1", "2")
                assert page.locator("main script, main img[src=x]").count() == 0


_MANY = 10**9


def _fake_rows(route: Any) -> None:
    """Answer for a dataset of 10⁹ rows."""
    url = route.request.url
    start, count = (int(re.search(rf"{key}=(\d+)", url)[1]) for key in ("start", "count"))  # type: ignore[index]
    rows = [
        {
            **{"position": i, "row": i, "title": f"n{i}", "label": None, "text": f"row {i}"},
            **{"subset": None, "damaged": None, "marked": False, "image": None},
        }
        for i in range(start, min(_MANY, start + count))
    ]
    answer = {"n": _MANY, "n_total": _MANY, "complete": True, "progress": 1, "rows": rows}
    route.fulfill(body=json.dumps(answer), content_type="application/json")


def test_a_billion_rows_scroll_exactly(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link) as page:
        page.route("**/api/rows*", _fake_rows)
        go(page, "#/grid?view=list&at=500000003")
        page.wait_for_selector(".line .title >> text=n500000003")
        assert result(page, "firstPosition()") == 500_000_003
        height = page.evaluate("document.querySelector('.line').getBoundingClientRect().height")
        page.mouse.move(800, 500)
        page.mouse.wheel(0, 5 * height)
        until(page, "firstPosition() === 500000008")
        page.mouse.wheel(0, -7 * height)
        until(page, "firstPosition() === 500000001")
        until(page, "location.hash.includes('at=500000001')")
        page.keyboard.press("End")
        page.wait_for_selector(".line .title >> text=n999999999")
        page.keyboard.press("ArrowUp")
        until(page, "document.activeElement.dataset.position === '999999998'")
        page.keyboard.press("Home")
        page.wait_for_selector(".line .title >> text=/^n0$/")
        # The scroll bar maps its range to all rows.
        page.locator(".scroller").evaluate("node => { node.scrollTop = node.scrollHeight / 2; }")
        until(page, "Math.abs(firstPosition() / 1e9 - 0.5) < 0.01")
        assert page.locator(".window > *").count() < 100
        assert page.evaluate("document.querySelector('.scroller').scrollHeight") < 10_000_000


# --- one sample -------------------------------------------------------------------------------


def test_cameras_share_a_clock_and_step_by_frames(visits: Visits, episodes_link: str) -> None:
    with visits.page(episodes_link, "#/sample/1") as page:
        page.wait_for_selector("video >> nth=1")
        until(page, "[...document.querySelectorAll('video')].every(v => v.readyState >= 2)")
        assert page.locator("canvas[data-frame]").count() == 0
        for key, frame in ((".", 1), (".", 2), (".", 3), (",", 2)):
            page.keyboard.press(key)
            until(page, f"frames(30).every(each => each === {frame})")
            assert page.locator(".frame").inner_text() == f"frame {frame} / 44"
        page.keyboard.press("Shift+ArrowRight")
        until(page, "frames(30).every(each => each === 32)")
        until(page, "location.hash.includes('t=1.08')")
        state = hash_of(page)
        # The chart's cursor is the clock's time.
        chart = page.get_by_role("slider", name=re.compile("Chart of observation.state"))
        assert chart.get_attribute("aria-valuenow") == "32"
        box = chart.bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.25, box["y"] + 20)
        until(page, "frames(30).every(each => each === 11)")
        with visits.page(episodes_link, state) as other:
            until(other, "frames(30).length === 2 && frames(30).every(each => each === 32)")
        # Space plays and pauses both, which stay within a few frames of each other.
        page.keyboard.press(" ")
        until(page, "[...document.querySelectorAll('video')].every(v => !v.paused)")
        until(page, "frames(30)[0] > 15")
        page.keyboard.press(" ")
        until(page, "[...document.querySelectorAll('video')].every(v => v.paused)")
        first, second = result(page, "frames(30)")
        assert abs(first - second) <= 6
        page.keyboard.press("k")
        page.wait_for_selector(".sample-head >> text=1 of 2")
        assert page.locator("[data-field=task] >> text=Put the cup").count() == 1


def test_codec_that_the_browser_lacks_is_drawn_by_frames(visits: Visits, mixture_link: str) -> None:
    with visits.page(mixture_link, "#/sample/0") as page:
        camera = page.locator(".camera[data-field=video]")
        page.wait_for_selector(".camera[data-field=video] canvas[data-frame='0']")
        assert "frames are decoded by shardio" in camera.inner_text()
        assert page.locator("video").count() == 0
        page.keyboard.press(".")
        page.keyboard.press(".")
        until(page, "draws('video', 2)")
        # Raw frames are on the same clock, and so is the sound with its waveform.
        page.wait_for_selector(".camera[data-field=frames] canvas[data-frame]")
        assert page.locator("audio").count() == 1
        page.wait_for_selector("[data-field=sound] .wave canvas")
        page.keyboard.press(" ")
        until(page, "document.querySelector('audio').currentTime > 0.3")
        page.keyboard.press(" ")
        until(page, "document.querySelector('audio').paused")


def test_every_kind_of_value(visits: Visits, mixture_link: str) -> None:
    with visits.page(mixture_link, "#/sample/2") as page:
        field = "[data-field='{}'] "
        page.wait_for_selector(field.format("attention") + ".heat .scale >> text=bright")
        page.wait_for_selector(field.format("signal") + "[role=slider]")
        page.wait_for_selector(field.format("mask") + "img")
        until(page, "document.querySelector('[data-field=mask] img').naturalWidth === 64")
        assert page.locator(field.format("tokens") + ".tokens span").count() == 300
        assert "300" in page.locator(field.format("meta") + ".tree").inner_text()
        assert page.locator(field.format("blob") + ".hex").inner_text().startswith("0000  00 01")
        assert page.locator(field.format("weight")).inner_text().endswith("0.5")
        assert "no value" in page.locator(field.format("hint")).inner_text()
        assert page.locator(field.format("boxes") + ".preview > div").count() == 3
        with page.expect_download() as waiting:
            page.get_by_label("Download blob").click()
        assert Path(waiting.value.path()).read_bytes() == bytes(range(256)) * 3
        # A chart without a clock has a cursor of its own.
        chart = page.get_by_role("slider", name=re.compile("Chart of signal"))
        chart.focus()
        before = int(chart.get_attribute("aria-valuenow"))
        page.keyboard.press("ArrowRight")
        assert int(chart.get_attribute("aria-valuenow")) == before + 1


def test_pictures_zoom(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link, "#/sample/3") as page:
        until(page, "document.querySelector('.zoom img')?.naturalWidth > 0")
        size = "document.querySelector('.zoom img').getBoundingClientRect().width"
        page.wait_for_selector(".zoom-tools >> text=%")
        fitted = page.evaluate(size)
        page.locator(".zoom").focus()
        page.keyboard.press("+")
        until(page, f"{size} > {fitted * 1.3}")
        page.keyboard.press("0")
        until(page, f"Math.abs({size} - {fitted}) < 1")


# --- loader, damage, marks --------------------------------------------------------------------


def test_batches_and_two_epochs_side_by_side(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link, "#/loader?batch_size=8&shuffle=full&seed=3") as page:
        page.wait_for_selector(".batch-text >> text=batch 0 of 8")
        until(page, "[...document.querySelectorAll('.samples img')].some(i => i.naturalWidth)")
        first = result(page, "batch(1)")
        assert len(first) == 8
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".batch-text >> text=batch 1 of 8")
        second = result(page, "batch(1)")
        assert not set(first) & set(second)
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector(".batch-text >> text=batch 0 of 8")
        assert result(page, "batch(1)") == first
        page.keyboard.press("2")
        page.wait_for_selector(".epochs.two h2 >> text=Epoch 1")
        page.wait_for_selector(".epochs > section:nth-child(2) .samples a")
        assert result(page, "batch(2)") != first
        state = hash_of(page)
        with visits.page(pictures_link, state) as other:
            other.wait_for_selector(".epochs > section:nth-child(2) .samples a")
            assert result(other, "batch(1)") == first


def _turned(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with a square of its picture, upside down."""
    return {**sample, "image": np.ascontiguousarray(sample["image"][::-1, :60])}


def test_loader_of_the_user_shows_what_its_transform_returns(
    visits: Visits, pictures: Path
) -> None:
    options = {"batch_size": 4, "shuffle": True, "num_workers": 0, "transform": _turned}
    with serving(pictures, loader=options) as link, visits.page(link, "#/loader") as page:
        page.wait_for_selector(".lead >> text=_turned")
        until(page, "document.querySelectorAll('.samples img').length === 4")
        until(page, "[...document.querySelectorAll('.samples img')].every(i => i.naturalWidth)")
        assert "epoch/0/0/0/image" in page.locator(".samples img >> nth=0").get_attribute("src")
        assert page.locator("select[name=shuffle]").count() == 0


def test_texts_and_tokens_are_shown_in_a_batch(visits: Visits, folder: Path) -> None:
    numbers = [[1_000 + i, *range(i)] for i in range(4)]
    made = {"text": [f"line {i}" for i in range(4)], "tokens": numbers, "count": [1234567] * 4}
    shardio.convert(made, folder / "words")
    first = ["text line 0", "tokens int64 1: 1,000", "count 1,234,567"]
    with serving(folder / "words") as link, visits.page(link, "#/loader") as page:
        page.wait_for_selector(".batch-text >> text=batch 0 of 1")
        assert texts(page, ".samples .values")[0].split("\n") == first
    options = {"batch_size": 2, "num_workers": 0}
    with serving(folder / "words", loader=options) as link, visits.page(link, "#/loader") as page:
        page.wait_for_selector(".batch-text >> text=batch 0 of 2")
        found = texts(page, ".samples .values")[1].split("\n")
        assert found == ["text line 1", "tokens int64 2: 1,001 0", "count 1,234,567"]


def test_damage_is_found_and_crossed_out(visits: Visits, folder: Path) -> None:
    broken = made_sets.make_pictures(folder / "broken", 12, height=60)
    (shard,) = broken.glob("*.shard")
    content = bytearray(shard.read_bytes())
    content[content.index(b"\xff\xd8\xff", 2000) + 40] ^= 255
    shard.write_bytes(content)
    with serving(broken) as link, visits.page(link, "#/damage") as page:
        page.get_by_role("button", name="Verify the dataset").click()
        page.wait_for_selector("section[aria-label=Findings] tbody tr")
        row = texts(page, "section[aria-label=Findings] tbody td a")[0]
        page.keyboard.press("g")
        page.wait_for_selector(".tile.damaged .cross")
        damaged = page.locator(".tile.damaged")
        assert damaged.count() == 1
        assert damaged.get_attribute("href").startswith(f"#/sample/{row}")
        damaged.click()
        page.wait_for_selector(".notice.bad >> text=Cannot be read in full")
        assert page.locator("[data-field=caption]").count() == 1
        # The browser itself reports thumbnails that are answered with an error.
        visits.errors = [each for each in visits.errors if "status of 4" not in each]


def test_marks_are_saved_as_a_subset(visits: Visits, folder: Path) -> None:
    path = made_sets.make_pictures(folder / "marked", 12, height=60)
    with serving(path, is_writable=True) as link, visits.page(link, "#/grid") as page:
        page.wait_for_selector(".tile .title")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("m")
        flag = ".cell:has([data-position='{}']) .flag[aria-pressed={}]"
        page.wait_for_selector(flag.format(1, "true"))
        for pressed in ("true", "false"):  # by click: marked, and not marked again
            page.get_by_label("Mark tiles-0002.jpg").click()
            page.wait_for_selector(flag.format(2, pressed))
        page.locator("[data-position='1']").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.wait_for_selector(".sample-head >> text=4 of 12")
        page.keyboard.press("n")
        page.keyboard.type("sharp <b>edges</b>")
        page.keyboard.press("Enter")
        page.wait_for_selector(".mark-button[aria-pressed=true]")
        page.keyboard.press("b")
        page.wait_for_selector(".marks-list li:nth-child(2)")
        assert page.get_by_label("Note of sample 3").input_value() == "sharp <b>edges</b>"
        page.get_by_label("Save as the subset").fill("keep")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Saved 2 samples")
        code = page.locator(".notice code").inner_text()
        assert code == f'shardio.ShardLoader(shardio.open("{path}").subset("keep"), batch_size=32)'
        page.get_by_label("Save as the subset").focus()
        page.keyboard.press("Enter")  # the same name again
        page.wait_for_selector("text=choose another name, or tick “replace”")
        assert ["status of 400" in each for each in visits.errors] == [True]
        visits.errors.clear()
        page.get_by_label("replace a subset of this name").check()
        page.get_by_role("button", name="Save").click()
        page.wait_for_selector("text=Saved 2 samples")
        page.get_by_role("link", name="keep").click()
        page.wait_for_selector(".results-bar .n >> text=2 of 12")
        page.wait_for_selector("legend >> text=Class in keep")
        counts = "[...document.querySelectorAll('[data-key=class] .n')].map(n => n.textContent)"
        until(page, f"{counts}.reduce((sum, n) => sum + Number(n), 0) === 2")
        page.locator(".chip").click()
        until(page, f"{counts}.reduce((sum, n) => sum + Number(n), 0) === 12")
    with shardio.open(path) as dataset:
        loader = shardio.ShardLoader(dataset.subset("keep"), 2, num_workers=0)
        with loader:
            batch = next(iter(loader))
            assert sorted(np.asarray(batch.origins)[:, 1].tolist()) == [1, 3]


def test_marks_without_writable_say_how_to_save(visits: Visits, pictures_link: str) -> None:
    with visits.page(pictures_link, "#/sample/2") as page:
        page.wait_for_selector(".mark-button")
        page.keyboard.press("m")
        page.keyboard.press("b")
        page.wait_for_selector("text=--writable")
        command = page.locator(".notice code").inner_text()
        assert command.startswith("shardio view /") and command.endswith("/pictures --writable")
        page.get_by_label("Remove the mark of sample 2").click()
        page.wait_for_selector("text=No sample is marked")


def test_a_new_generation_is_announced_and_shown(visits: Visits, tmp_path: Path) -> None:
    rows = [{"x": i, "text": f"row {i}"} for i in range(5)]
    shardio.convert(rows, tmp_path / "set")
    look = "window.dispatchEvent(new Event('focus'))"
    with serving(tmp_path / "set") as link, visits.page(link, "#/grid?sort=x") as page:
        page.wait_for_selector("[data-position='4']")
        page.locator("[data-position='3']").focus()
        page.keyboard.press("m")
        assert page.locator("#update").inner_text() == ""
        shardio.convert(rows[:2], tmp_path / "set", append=True)
        page.evaluate(look)
        page.wait_for_selector(
            "#update >> text=The dataset has a new generation, with 2 more samples."
        )
        page.get_by_label("Dismiss").click()
        until(page, "document.querySelector('#update').textContent === ''")
        add_subset(tmp_path / "set", "few", [0])
        page.evaluate(look)
        page.get_by_role("link", name="Show generation 3").click()
        page.wait_for_selector("[data-position='6']")
        assert hash_of(page).startswith("#/grid?sort=x")
        until(page, "document.querySelector('#mark-count').textContent === '1'")
        shutil.rmtree(tmp_path / "set")
        shardio.convert(rows[:3], tmp_path / "set")
        page.evaluate(look)
        page.wait_for_selector(
            "#update >> text=Another dataset was written here, with other rows: 1 mark will be"
        )
        page.get_by_role("link", name="Show generation 1").click()
        page.wait_for_selector(".facts >> text=3")
        assert hash_of(page) == "#/"
        until(page, "document.querySelector('#mark-count').hidden")


# --- an exported site ---


@contextlib.contextmanager
def _file_server(folder: Path) -> Iterator[str]:
    """Serve files as any web server does."""
    handler = functools.partial(_Files, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def test_exported_site_needs_only_a_file_server(
    visits: Visits, pictures: Path, folder: Path
) -> None:
    assert export_site(str(pictures), folder / "site", n_samples=20) == 20
    with _file_server(folder / "site") as link, visits.page(link) as page:
        page.wait_for_selector(".histogram >> text=brightness")
        assert page.locator("nav a").count() == 2
        page.keyboard.press("g")
        page.wait_for_selector(".results-bar .n >> text=20 samples")
        until(page, "[...document.querySelectorAll('.tile img')].some(i => i.naturalWidth)")
        rows = [int(href.split("/")[2]) for href in result(page, "links('.tile')")]
        assert rows == sorted(rows) and rows[-1] == 59
        page.locator(".tile >> nth=2").click()
        page.wait_for_selector(".sample-head >> text=3 of 20")
        until(page, "document.querySelector('.zoom img')?.naturalWidth > 0")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".sample-head >> text=4 of 20")
        assert hash_of(page).startswith(f"#/sample/{rows[3]}")
        go(page, "#/grid?text=caption:rings&sort=brightness&desc=1")
        page.wait_for_selector(".results-bar .n >> text=of 20 samples")
        page.wait_for_selector(".tile .title")
        assert {text.split("-")[0] for text in texts(page, ".tile .title")} == {"rings"}
        go(page, "#/sample/1")
        page.wait_for_selector("text=not among the exported")


def test_exported_videos_are_sought_without_ranges(
    visits: Visits, clips_link: str, folder: Path
) -> None:
    export_site(str(folder / "clips"), folder / "films", n_samples=2)
    with _file_server(folder / "films") as link, visits.page(link, "#/sample/0") as page:
        page.wait_for_selector("video[src^=blob]")
        until(page, "document.querySelector('video').readyState >= 2")
        for frame in (1, 2):
            page.keyboard.press(".")
            until(page, f"frames(25)[0] === {frame}")


# --- how it looks -----------------------------------------------------------------------------

_PLACES = (
    ("pictures", "#/", ".histogram"),
    ("pictures", "#/grid?class=1&sort=brightness", ".tile .title"),
    ("pictures", "#/sample/3", ".zoom-tools >> text=%"),
    ("pictures", "#/loader?shuffle=full&epoch2=1", ".samples a"),
    ("pictures", "#/damage", "text=Verify the dataset"),
    ("pictures", "#/marks", "text=No sample is marked"),
    ("episodes", "#/sample/0", ".chart"),
    ("clips", "#/", "section[aria-label=Conversion]"),
    ("mixture", "#/sample/1", ".heat .scale >> text=bright"),
)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_pages_fit_and_are_legible(
    visits: Visits,
    pictures_link: str,
    episodes_link: str,
    mixture_link: str,
    clips_link: str,
    size: tuple[int, int],
) -> None:
    links = {"pictures": pictures_link, "episodes": episodes_link, "mixture": mixture_link}
    links["clips"] = clips_link
    for name, link in links.items():
        with visits.page(link, size=size) as page:
            for place, selector in [each[1:] for each in _PLACES if each[0] == name]:
                go(page, place)
                page.wait_for_selector(selector)
                for scheme in ("light", "dark"):  # the next place opens in the dark one
                    page.emulate_media(color_scheme=scheme)
                    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
                    assert (dark == "rgb(255, 255, 255)") == (scheme == "light")
                    found = result(page, "overflow()")
                    assert found == {"isWide": False, "cut": []}, place
                    assert result(page, "faint()") == [], place
            if size == NARROW and name == "pictures":
                go(page, "#/grid")
                page.get_by_role("button", name="Filter", exact=True).click()
                page.wait_for_selector("#filters.open")
                assert result(page, "overflow()") == {"isWide": False, "cut": []}
                page.get_by_label("Close the filters").click()


def test_the_page_is_not_wider_than_the_narrowest_screens(
    visits: Visits, pictures_link: str
) -> None:
    with visits.page(pictures_link, size=(320, 500)) as page:
        for place in ("#/", "#/grid", "#/sample/1", "#/loader", "#/damage", "#/marks"):
            page.evaluate("place => { location.hash = place; }", place)
            page.wait_for_selector("main h1, main .results-bar, main form", state="attached")
            assert page.evaluate("document.documentElement.scrollWidth") <= 320, place
