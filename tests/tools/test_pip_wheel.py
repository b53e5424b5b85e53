"""Without ensurepip, the wheel of pip is fetched as pip itself would fetch it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import _pip_wheel

CONFIGURATION_FILES = _pip_wheel.configuration_files


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_pip_wheel, "configuration_files", lambda: [tmp_path / "pip.conf"])


def _make_index(folder: Path, wheels: dict[str, str], *, damaged: str = "") -> str:
    """Write an index of wheels, each with further attributes for its link; return its URL."""
    (folder / "pip").mkdir(parents=True)
    links = []
    for name, attributes in wheels.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        content = "damaged" if name == damaged else name
        (folder / "pip" / name).write_text(content)
        links.append(f'<a href="{name}#sha256={digest}" {attributes}>{name}</a>')
    (folder / "pip" / "index.html").write_text("\n".join(links))
    return folder.as_uri()


NEWEST = "pip-24.10-py3-none-any.whl"
WHEELS = {
    "pip-9.0.3-py2.py3-none-any.whl": "",
    NEWEST: 'data-requires-python="&gt;=3.8"',
    "pip-24.9.1-py3-none-any.whl": "",
    "pip-25.0b1-py3-none-any.whl": "",
    "pip-25.1-py3-none-any.whl": 'data-yanked="broken"',
    "pip-99.0-py3-none-any.whl": 'data-requires-python="&gt;=3.99"',
    "pip-99.1.tar.gz": "",
}


@pytest.mark.parametrize("where", ["environment", "file", "further"])
def test_newest_final_wheel(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = _make_index(tmp_path / "index", WHEELS)
    if where == "file":
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {url}\n")
    elif where == "further":
        monkeypatch.setenv("PIP_INDEX_URL", _make_index(tmp_path / "empty", {}))
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", url)
    else:
        monkeypatch.setenv("PIP_INDEX_URL", url)
    wheel = _pip_wheel.fetch(tmp_path)
    assert (wheel.name, wheel.read_text()) == (NEWEST, NEWEST)


def test_pip_config_files_are_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    files = CONFIGURATION_FILES()
    assert files[:2] == [tmp_path / "pip.conf", Path("/home/ada/.config/pip/pip.conf")]
    assert Path("/etc/pip.conf") in files


def test_a_wheel_of_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = _make_index(tmp_path / "index", WHEELS, damaged=NEWEST)
    monkeypatch.setenv("PIP_INDEX_URL", url)
    with pytest.raises(_pip_wheel.Unavailable, match="found other bytes"):
        _pip_wheel.fetch(tmp_path)
    assert not (tmp_path / NEWEST).exists()


def test_an_unreachable_index_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "missing").as_uri())
    with pytest.raises(_pip_wheel.Unavailable, match="missing: "):
        _pip_wheel.fetch(tmp_path)
