"""A headless Chromium with pages of a viewer; requests to anywhere else are refused and counted."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from shardio_tools.view.app import ViewerState, make_app
from shardio_tools.view.security import Security
from shardio_tools.view.server import ViewServer

CHROMIUM: Final = Path("/usr/bin/chromium-headless-shell")
CHECKS: Final = Path(__file__).with_name("checks.js").read_text()
"""Functions of JavaScript that tests call in the page."""
WIDE, NARROW = (1440, 900), (360, 740)
_TOKEN: Final = "a-token-of-the-tests"
TIMEOUT_S: Final = 20.0


def why_no_browser() -> str | None:
    """Return why the browser tests cannot run here; None if they can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "Playwright is not installed"
    return None if CHROMIUM.exists() else f"{CHROMIUM} is not installed"


@contextlib.contextmanager
def browsing() -> Iterator[Any]:
    """Run a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM),
            args=["--no-sandbox", "--autoplay-policy=no-user-gesture-required"],
        )
        with contextlib.closing(browser):
            yield browser


@contextlib.contextmanager
def serving(path: Path, **options: Any) -> Iterator[str]:
    """Serve a dataset as `shardio view` does, and yield the link with the token."""
    server = ViewServer("127.0.0.1", 0)
    with ViewerState(str(path), **options) as viewer:
        is_writable = bool(options.get("is_writable"))
        guarded = Security(
            make_app(viewer), _TOKEN, "127.0.0.1", server.port, is_writable=is_writable
        )
        thread = threading.Thread(target=server.run, args=(guarded,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.port}/?token={_TOKEN}"
        finally:
            server.stop()
            thread.join()


class Visits:
    """Pages of one browser, and what went wrong in them."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.errors: list[str] = []
        self.n_foreign = 0

    @contextlib.contextmanager
    def page(
        self, link: str, hash_: str = "", *, size: tuple[int, int] = WIDE, scheme: str = "light"
    ) -> Iterator[Any]:
        """Open a page of its own, with a browser that knows nothing of other pages."""
        origin = link.split("?", 1)[0].rsplit("/", 1)[0]
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            accept_downloads=True,
        )
        context.set_default_timeout(TIMEOUT_S * 1000)

        def refuse(route: Any) -> None:
            self.n_foreign += 1
            route.abort()

        # Only these requests wait for this process.
        context.route(re.compile(f"^(?!{re.escape(origin)}/)"), refuse)
        page = context.new_page()
        page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        page.on("console", self._console)
        with contextlib.closing(context):
            page.goto(link)
            page.wait_for_selector("nav a")
            if hash_:
                page.evaluate("hash => { location.hash = hash; }", hash_)
            yield page

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            where = message.location.get("url", "")
            self.errors.append(f"{message.type}: {message.text} {where}")

    def check(self) -> None:
        """Raise if a page had an error, or asked another server for anything."""
        errors, self.errors = self.errors, []
        assert not errors, errors
        assert self.n_foreign == 0


@contextlib.contextmanager
def visiting() -> Iterator[Visits]:
    """Yield visits with a browser; skip the test if there is none."""
    if (reason := why_no_browser()) is not None:
        pytest.skip(reason)
    with browsing() as browser:
        yield Visits(browser)
