"""Make the pictures of the documentation that show the viewer's page.

    python -m tests.tools.view.screenshots docs/images

The datasets are drawn for the purpose. Needs Playwright and a Chromium; see `browsing`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.tools.view import made_sets
from tests.tools.view.browsing import Visits, browsing, serving, why_no_browser

SIZE: Final = (1120, 700)
MAX_BYTES: Final = 150_000


def main(arguments: list[str] | None = None) -> None:
    """Write the pictures to a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder of the pictures")
    out: Path = parser.parse_args(arguments).out
    if (reason := why_no_browser()) is not None:
        raise SystemExit(reason)
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    with (
        tempfile.TemporaryDirectory() as temporary,
        contextlib.chdir(temporary),  # the pages show the paths
        browsing() as browser,
    ):
        folder, visits = Path(), Visits(browser)
        pictures = made_sets.make_pictures(folder / "landscapes", 480)
        with serving(pictures, is_writable=True) as link:
            _overview(visits, link, out)
            _grid(visits, link, out)
            _loader(visits, link, out)
        episodes = made_sets.make_episodes(folder / "episodes", folder / "videos", 3)
        with serving(episodes) as link:
            _sample(visits, link, out)
        visits.check()


def _overview(visits: Visits, link: str, out: Path) -> None:
    with visits.page(link, size=SIZE) as page:
        page.wait_for_selector(".histogram >> text=brightness")
        page.wait_for_selector("section[aria-label=History] tbody tr")
        _write(page, out / "view-overview.png")


def _grid(visits: Visits, link: str, out: Path) -> None:
    with visits.page(link, "#/grid?range=brightness:0.35:", size=SIZE) as page:
        page.wait_for_selector(".filters .histogram")
        page.wait_for_selector("[data-position='8'] .title")
        for position in (3, 8):
            page.locator(f"[data-position='{position}']").focus()
            page.keyboard.press("m")
        _write(page, out / "view-grid.png")


def _loader(visits: Visits, link: str, out: Path) -> None:
    with visits.page(
        link, "#/loader?batch_size=12&shuffle=full&epoch2=1&batch=3", size=SIZE
    ) as page:
        page.wait_for_selector(".epochs > section:nth-child(2) .samples a")
        _write(page, out / "view-loader.png")


def _sample(visits: Visits, link: str, out: Path) -> None:
    with visits.page(link, "#/sample/1?t=1.25", size=SIZE, scheme="dark") as page:
        page.wait_for_selector(".chart >> nth=1")
        _write(page, out / "view-sample.png")


def _write(page: Any, path: Path) -> None:
    """Write a screenshot as a PNG with a palette, once all pictures and videos are shown."""
    from PIL import Image

    page.evaluate("() => document.activeElement.blur()")
    page.locator("#toast.shown").wait_for(state="detached")
    page.wait_for_load_state("networkidle")
    while page.evaluate(
        "() => [...document.querySelectorAll('main img')].some(each => !each.complete) || "
        "[...document.querySelectorAll('video')].some(each => each.seeking || each.readyState < 2)"
    ):
        page.wait_for_timeout(20)
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.save(path, optimize=True)
    if path.stat().st_size > MAX_BYTES:
        palette = shot.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        palette.save(path, optimize=True)
    n_bytes = path.stat().st_size
    if n_bytes > MAX_BYTES:
        raise SystemExit(f"{path} has {n_bytes:,} bytes; the maximum is {MAX_BYTES:,}")
    print(f"{path}: {n_bytes:,} bytes")


if __name__ == "__main__":
    main()
