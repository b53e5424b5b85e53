"""The site builds without a warning, its links lead somewhere, and browsers fetch nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

import shardio

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MISSING = [name for name in ("sphinx", "myst_parser", "furo") if find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

# `python -m sphinx` without garbage collections, which take a fifth of a build and free little.
SPHINX = """
import gc, sys
gc.disable()
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


class Page(HTMLParser):
    """The links and anchors of an HTML page, and the addresses that a browser fetches for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what one element has."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("href", "#") != "#":
            self.fetched.append(values["href"] or "")
        self.fetched += [values[name] for name in ("src", "srcset", "poster") if name in values]


def build(out: Path) -> None:
    """Build the site with warnings as errors."""
    command = [sys.executable, "-c", SPHINX, "-q", "-W", "--keep-going"]
    paths = ["-d", str(out.parent / "doctrees"), str(DOCS), str(out)]
    done = subprocess.run(command + paths, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def problems(site: Path) -> list[str]:
    """Return the broken links of all pages, and what a browser would fetch from elsewhere."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for address in page.fetched:
            if address.startswith("data:"):
                continue
            file = (path.parent / unquote(address.partition("?")[0])).resolve()
            if "//" in address or not file.exists():
                found.append(f"{name} fetches {address}")
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (path.parent / target).resolve() if target else path
            if not there.exists():
                found.append(f"{name} links to {link}")
            elif anchor and there in pages and anchor not in pages[there].anchors:
                found.append(f"{name} links to {link}")
    for style in sorted(site.rglob("*.css")):
        remote = re.findall(
            r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^)\"']+)", style.read_text()
        )
        found += [f"{style.name} fetches {address}" for address in remote]
    return found


@pytest.mark.slow
def test_the_site_is_whole(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build(site)
    assert problems(site) == []

    api = site / "reference" / "api"
    for name in {*shardio.__all__, *shardio._MODULES} - {"__version__", *shardio.errors.__all__}:
        assert (api / f"shardio.{name}.html").exists()
    loader = Page((api / "shardio.ShardLoader.html").read_text("utf-8"))
    names = {name for name in dir(shardio.ShardLoader) if not name.startswith("_")}
    assert {f"shardio.ShardLoader.{name}" for name in names} <= loader.anchors

    tutorial = Page((site / "tutorial.html").read_text("utf-8"))
    navigation = {"how-to/convert.html", "reference/loader/views.html", "reference/loader.html"}
    assert navigation <= {*tutorial.links}

    index = (site / "searchindex.js").read_text("utf-8")
    found = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    assert "shuffl" in found["terms"] and "ShardLoader" in found["titles"]

    listed = re.findall(r"^- \[.+\]\((.+)\)$", (site / "llms.txt").read_text("utf-8"), re.MULTILINE)
    assert [target for target in listed if not (site / target).exists()] == []
    sources = {f"_sources/{page.relative_to(DOCS).as_posix()}.txt" for page in DOCS.rglob("*.md")}
    assert sources - {"_sources/index.md.txt"} <= {*listed}
    cited = (site / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {shardio.__version__}\n" in cited


def test_what_is_wrong_with_a_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a id="x" href="#x">1</a> <a href="b.html#y">2</a> <a href="https://example.org">3</a>'
    )
    (tmp_path / "b.html").write_text('<p id="y"><img src="a.html">')
    (tmp_path / "c.css").write_text("a { background: url(img.png) }")
    assert problems(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="none.html"></a><script src="https://cdn.org/x.js">')
    (tmp_path / "c.css").write_text('@import "https://fonts.org/x.css";')
    assert problems(tmp_path) == [
        "a.html links to b.html#y",
        "b.html fetches https://cdn.org/x.js",
        "b.html links to none.html",
        "c.css fetches https://fonts.org/x.css",
    ]


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_site", DOCS / "_site.py")
    if spec is None or spec.loader is None:
        pytest.fail("cannot load docs/_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("docstring", "converted"),
    [
        ("Return `a` or `b*`.", "Return ``a`` or ``b*``."),
        ("Pass *args and x_ | y.", r"Pass \*args and x\_ \| y."),
        ("* one\n* `two\n  three`", "* one\n* ``two\n  three``"),
        ("Write:\n\n    x = 1\n\nThen:\n* y", "Write::\n\n    x = 1\n\nThen:\n* y"),
    ],
)
def test_a_docstring_is_converted(extension: ModuleType, docstring: str, converted: str) -> None:
    lines = docstring.split("\n")
    extension.to_restructuredtext(None, "function", "f", None, None, lines)
    assert "\n".join(lines) == converted


def test_links_are_those_of_the_page_that_shows_a_text(extension: ModuleType) -> None:
    text = "[a](docs/tutorial.md#x) [b](https://example.org) [c](shardio/README.md) [d](#y)"
    there = "contributing/packages/shardio.markdown"
    expected = f"[a](tutorial.md#x) [b](https://example.org) [c]({there}) [d](#y)"
    assert extension.relink(text, ROOT / "README.md", "index") == expected
