"""Show a dataset in the browser or in a notebook: `shardio view` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import weakref
import webbrowser
from typing import Final

from shardio._base.classes import Closing
from shardio._base.html import escaped
from shardio._base.progress import display_kind
from shardio.errors import UnsupportedEnvironment, import_extra

_PROGRAM: Final = """
import os, signal, sys, threading

def end_with_parent():
    sys.stdin.buffer.read()  # returns when the parent closes the pipe, or has exited
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from shardio_tools.entry import main
raise SystemExit(main())
"""
_HEIGHT: Final = 640


class Viewer(Closing):
    """A running `shardio view`, which ends with `close` or with this process.

    In a notebook, it is shown as a frame with the page. `link` leads to the page.
    """

    _public = "close link"

    def __init__(self, path: str) -> None:
        import_extra("showing a dataset needs Starlette and uvicorn", "view", "starlette")
        words = [sys.executable, "-c", _PROGRAM, "view", "--no-open", "--", path]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._end = weakref.finalize(self, _end, process)
        self.link = process.stdout.readline().strip() if process.stdout is not None else ""
        if not self.link:
            self.close()
            raise UnsupportedEnvironment(
                f"{path}: the viewer has ended; run it to see why: shardio view {path}"
            )

    def close(self) -> None:
        """End the server. Idempotent."""
        self._end()

    def __repr__(self) -> str:
        return f"Viewer({self.link})"

    def _repr_html_(self) -> str:
        # Frames get cookies if notebook and page are one site: usually, both are at `localhost`.
        link = escaped(self.link.replace("//127.0.0.1:", "//localhost:"), 200)
        style = f"width:100%;height:{_HEIGHT}px;border:1px solid rgba(128,128,128,.4)"
        return (
            f'<iframe src="{link}" style="{style}"></iframe>'
            f'<div><a href="{link}" target="_blank" rel="noopener">open in a window</a></div>'
        )


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def show(path: str) -> Viewer:
    """Start a viewer; outside of notebooks, open its page in the browser."""
    viewer = Viewer(path)
    if display_kind(sys.stdout) != "notebook":
        webbrowser.open(viewer.link)
    return viewer
