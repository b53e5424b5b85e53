"""The files of the viewer's page: small, complete, and without what its security policy forbids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

import shardio_tools.view

STATIC: Final = Path(shardio_tools.view.__file__).parent / "static"
FILES: Final = sorted(STATIC.iterdir())
MODULES: Final = [path for path in FILES if path.suffix == ".js"]
SVG_NAMESPACE: Final = "http://www.w3.org/2000/svg"


def test_files_are_at_most_300_kilobytes() -> None:
    assert {path.suffix for path in FILES} == {".css", ".html", ".js", ".svg"}
    assert sum(path.stat().st_size for path in FILES) < 300_000


def test_page_has_no_inline_script_or_style() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="module" src="static/main.js">',
    ]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    for name in re.findall(r'(?:src|href)="static/([^"]+)"', page):
        assert (STATIC / name).is_file()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_module_sets_text_only_and_imports_what_exists(path: Path) -> None:
    code = path.read_text()
    forbidden = r"\w*(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\b|\bFunction\("
    assert not re.search(forbidden, code)
    assert "cssText" not in code and "setAttribute('style'" not in code
    for name in re.findall(r"from '\./([^']+)'", code):
        assert (STATIC / name).is_file()
    assert not re.search(r"from '(?!\./)", code)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_names_no_other_server(path: Path) -> None:
    code = path.read_text().replace(SVG_NAMESPACE, "")
    assert not re.search(r"https?://|['\"(]//", code)
