"""dataset.show(): a viewer in a process of its own, which ends with its parent."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import shardio
from shardio.errors import InvalidArgument, UnsupportedEnvironment
from shardio.samples import preview
from tests.loading import PATIENCE_S, TWO_FIELDS, two_fields, write_dataset

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("show") / "set", 3, 1, TWO_FIELDS, two_fields(3))


def status(link: str) -> int | None:
    """Return the status of a link's answer; None if there is no server."""
    parts = urlsplit(link)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}")
        return connection.getresponse().status
    except ConnectionError:
        return None
    finally:
        connection.close()


def wait_for_end(link: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while status(link) is not None:
        assert time.monotonic() < end


def _browser(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Set a browser that writes down its argument; return that file, and the home folder."""
    home, opened, program = folder / "home", folder / "opened", folder / "browser"
    home.mkdir()
    program.write_text(f'#!/bin/sh\necho "$1" > {opened}.new; mv {opened}.new {opened}\n')
    program.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("BROWSER", f"{program} %s")
    return opened, home


def test_a_dataset_is_shown_in_the_browser_until_the_viewer_is_closed(
    dataset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened, home = _browser(tmp_path, monkeypatch)
    with shardio.open(dataset) as found, found.show() as shown:
        end = time.monotonic() + PATIENCE_S
        while not opened.exists():
            assert time.monotonic() < end
        (page,) = home.iterdir()  # other users see the address, and do not read the link in it
        assert opened.read_text().strip() == page.as_uri() and page.stat().st_mode & 0o777 == 0o600
        assert f"url={shown.link}" in page.read_text() and status(shown.link) == 303
        assert repr(shown) == f"Viewer({shown.link})"
    assert status(shown.link) is None and not [*home.iterdir()]
    shown.close()


def test_a_fork_that_lives_on_does_not_keep_the_server(dataset: str) -> None:
    shown = preview.Viewer(dataset)
    go_on, end = os.pipe()
    pid = os.fork()
    if pid == 0:  # it owns copies of the pipes, and no server
        os.close(end)
        shown.close()
        os.read(go_on, 1)
        os._exit(0)
    assert status(shown.link) == 303
    shown.close()
    assert status(shown.link) is None
    os.close(end)
    assert os.waitpid(pid, 0) == (pid, 0)
    os.close(go_on)


def test_a_notebook_shows_a_frame_of_the_same_site_and_opens_no_window(
    dataset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened, home = _browser(tmp_path, monkeypatch)
    monkeypatch.setattr(preview, "display_kind", lambda file: "notebook")
    with shardio.open(dataset) as found, found.show() as shown:
        html = shown._repr_html_()
        link = shown.link.replace("127.0.0.1", "localhost")
        assert html.startswith(f'<iframe src="{link}"') and f'<a href="{link}"' in html
        assert status(link) == 303
    assert not opened.exists() and not [*home.iterdir()]


def test_the_viewer_ends_with_a_process_that_is_killed(dataset: str) -> None:
    program = f"""
import shardio, sys
from shardio.samples.preview import Viewer
shown = Viewer({dataset!r})
print(shown.link, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        assert status(link) == 303
        process.kill()
        wait_for_end(link)


def test_a_viewer_that_cannot_start_says_how_to_see_why(
    dataset: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedEnvironment, match="run it to see why: shardio view "):
        preview.Viewer(str(tmp_path / "nowhere"))
    assert "there is no such folder" in capfd.readouterr().err


def test_the_extra_is_named_if_it_is_missing(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    with shardio.open(dataset) as found, pytest.raises(UnsupportedEnvironment, match=r"\[view\]"):
        found.show()


def test_a_mixture_has_no_page(dataset: str) -> None:
    with (
        shardio.mix({dataset: 1}) as mixture,
        pytest.raises(InvalidArgument, match=r"mixture\.sources\[0\]\.show\(\)"),
    ):
        mixture.show()
