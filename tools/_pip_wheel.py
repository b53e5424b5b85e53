"""Fetch pip's wheel from the package index, for a Python that came without ensurepip.

    python _pip_wheel.py FOLDER

Uses only the standard library, and listens to the same settings as pip (environment, then
configuration files): index-url, extra-index-url and cert.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import os
import re
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

DEFAULT_INDEX = "https://pypi.org/simple"
TIMEOUT_S = 60
# Final releases only: a wheel's version of digits and dots.
_WHEEL = re.compile(r"pip-(\d+(?:\.\d+)*)-(?:py2\.)?py3-none-any\.whl")
_AT_LEAST = re.compile(r">=\s*(\d+)\.(\d+)")


class Unavailable(Exception):
    """No index has a wheel of pip for this Python, or it cannot be reached."""


class _Links(HTMLParser):
    """Collects the attributes of every link of an index page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def configuration_files() -> list[Path]:
    """List the files that pip reads, the strongest first."""
    home = Path(os.path.expanduser("~"))
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    system = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    files = [user / "pip/pip.conf", home / ".pip/pip.conf", Path("/etc/pip.conf")]
    files += [Path(folder) / "pip/pip.conf" for folder in system]
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    return [Path(named), *files] if named else files


def setting(name: str) -> str | None:
    """Look a setting of pip up: in the environment, then in its configuration files."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if value:
        return value
    for file in configuration_files():
        parser = configparser.RawConfigParser()
        parser.read(file, encoding="utf-8")
        for section in ("install", "global"):
            if parser.has_option(section, name):
                return parser.get(section, name)
    return None


def read(url: str) -> bytes:
    """Read a URL; name and password in it become a header, which urllib would not do."""
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(url)
    if parts.username:
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        pair = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}")
        token = base64.b64encode(pair.encode()).decode()
        request = urllib.request.Request(
            place.geturl(), headers={"Authorization": f"Basic {token}"}
        )
    certificates = setting("cert") or os.environ.get("REQUESTS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=certificates or os.environ.get("CURL_CA_BUNDLE"))
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
        content: bytes = answer.read()
    return content


def newest_wheel(page: str, page_url: str) -> str | None:
    """Pick the newest usable wheel of an index page: its URL, with the hash as fragment."""
    links = _Links()
    links.feed(page)
    best: tuple[tuple[int, ...], str] | None = None
    for link in links.found:
        url = urllib.parse.urljoin(page_url, link.get("href") or "")
        name = _WHEEL.fullmatch(urllib.parse.urlsplit(url).path.rpartition("/")[2])
        needed = _AT_LEAST.search(link.get("data-requires-python") or "")
        too_old = needed is not None and sys.version_info < tuple(map(int, needed.groups()))
        if name is None or "data-yanked" in link or too_old:
            continue
        version = tuple(map(int, name[1].split(".")))
        if best is None or version > best[0]:
            best = version, url
    return best and best[1]


def fetch(folder: Path) -> Path:
    """Write pip's wheel into `folder` and return its path.

    Raises:
        Unavailable: every index failed; the message says how, one line each.
    """
    indexes = [setting("index-url") or DEFAULT_INDEX, *(setting("extra-index-url") or "").split()]
    failures = []
    for index in indexes:
        page_url = index.rstrip("/") + "/pip/"
        try:
            # A folder on disk, used as an index, has its page in a file.
            is_file = page_url.startswith("file:")
            page = read(page_url + "index.html" if is_file else page_url).decode()
            url = newest_wheel(page, page_url)
            if url is None:
                failures.append(f"{index}: no wheel of pip for Python {sys.version.split()[0]}")
                continue
            url, _, fragment = url.partition("#")
            content = read(url)
        except (OSError, ValueError) as error:
            failures.append(f"{index}: {error}")
            continue
        algorithm, _, digest = fragment.partition("=")
        if algorithm != "sha256" or hashlib.sha256(content).hexdigest() != digest:
            failures.append(
                f"{url}: expected {fragment or 'a sha256 in the link'}, found other bytes"
            )
            continue
        wheel = folder / url.rpartition("/")[2]
        wheel.write_bytes(content)
        return wheel
    raise Unavailable("\n".join(failures))


if __name__ == "__main__":
    try:
        print(fetch(Path(sys.argv[1])))
    except Unavailable as reason:
        sys.exit(f"{reason}")
