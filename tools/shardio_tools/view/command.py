"""Show a dataset in the browser.

Serves a page with fields, counts and classes, a grid of all samples, every field of a sample, what
a loader delivers, and damage. Prints a link, opens it, and runs until Ctrl-C. Only this machine is
served, and only with the token in the link. Nothing is written without --writable.

Examples:
    shardio view out/
    shardio view out/ --writable                  # marks become named subsets
    shardio view out/ --loader train.py:loader    # the samples of your loader
    shardio view s3://bucket/set --no-open --port 8000
    shardio view out/ --export site/              # a static site
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import secrets
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from shardio import InvalidArgument
from shardio.errors import import_extra
from shardio_tools.output import (
    escaped,
    flush,
    format_count,
    print_error,
    print_out,
    print_screen,
    utf8_name,
)
from shardio_tools.screen import Done

_HOST = "127.0.0.1"
_ALL_ADDRESSES = ("0.0.0.0", "::")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset: a folder, or its URL")
    add("--host", metavar="HOST", default=_HOST, help=f"address to listen at (default: {_HOST})")
    add("--port", type=int, metavar="N", default=0, help="port to listen at (default: a free one)")
    add("--no-open", action="store_true", help="print the link without opening it")
    add("--writable", action="store_true", help="let the page save marks as named subsets")
    add(
        "--loader",
        type=utf8_name,
        metavar="FILE.py:NAME",
        help="a ShardLoader, or a dict of its options; the file is executed",
    )
    add("--tokenizer", metavar="FILE", help="a tokenizer.json, which turns tokens into text")
    add("--export", metavar="DIR", help="write a static site to DIR instead, and exit")
    add("--overwrite", action="store_true", help="replace a static site in DIR")
    add(
        "--samples",
        type=int,
        metavar="N",
        default=100,
        help="number of samples of a static site (default: 100)",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal arrives, or export; return the exit code."""
    if not 0 <= options.port < 1 << 16:
        raise InvalidArgument(f"--port must be from 0 to 65535; found {options.port}")
    if options.samples < 1:
        raise InvalidArgument(f"--samples must be 1 or more; found {options.samples}")
    import_extra("shardio view needs Starlette and uvicorn", "view", "starlette", "uvicorn")
    if options.export is not None:
        return _export(options)
    from shardio_tools.view.app import ViewerState, make_app
    from shardio_tools.view.loader_file import load_named
    from shardio_tools.view.samples import load_tokenizer
    from shardio_tools.view.security import Security
    from shardio_tools.view.server import ViewServer

    loader = None if options.loader is None else load_named(options.loader)
    with ViewerState(
        options.path,
        is_writable=options.writable,
        loader=loader,
        loader_name=options.loader,
        tokenizer=None if options.tokenizer is None else load_tokenizer(options.tokenizer),
    ) as viewer:
        if options.writable:
            viewer.marks.check_writable()
        server = ViewServer(options.host, options.port)
        token = secrets.token_urlsafe(32)
        guarded = Security(
            make_app(viewer), token, options.host, server.port, is_writable=options.writable
        )
        opened = contextlib.ExitStack()

        def end() -> None:
            """End the process; the system then ends worker processes and frees their memory."""
            opened.close()
            os._exit(0)

        with server.stopped_by_signals(end), opened:
            link = _show_link(options, server.port, token)
            if not options.no_open:
                opened.enter_context(_opened(link))
            server.run(guarded)
    return 0


def _show_link(options: argparse.Namespace, port: int, token: str) -> str:
    """Print the link as a line of its own, and return it."""
    from shardio_tools.view.security import is_local

    if not is_local(options.host):
        print_error(
            f"warning: other machines can reach {options.host}, and the connection is not "
            "encrypted: whoever sees the link can read the dataset",
            "warning",
        )
    host = socket.gethostname() if options.host in _ALL_ADDRESSES else options.host
    name = f"[{host}]" if ":" in host else host
    link = f"http://{name}:{port}/?token={token}"
    print_out(link)
    flush()
    return link


@contextlib.contextmanager
def _opened(link: str) -> Iterator[None]:
    """Open a link in the browser, through a file that is removed after the `with` block."""
    page = _page_of_link(link)
    try:
        # The thread is not waited for: some browsers in terminals return only when they are closed.
        threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        yield
    finally:
        page.unlink(missing_ok=True)


def _page_of_link(link: str) -> Path:
    """Write a page that leads to a link with a token, for this user only; return its path.

    The command line of a browser shows its address to all users of the machine. The page is in the
    home folder, because some browsers are not allowed to read hidden and temporary folders.
    """
    home = os.path.expanduser("~")
    folder = home if os.access(home, os.W_OK | os.X_OK) else None
    descriptor, path = tempfile.mkstemp(".html", "shardio-view-", folder)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={html.escape(link)}">\n')
    return Path(path)


def _export(options: argparse.Namespace) -> int:
    """Write a static site, and return the exit code."""
    from shardio_tools.view.exporting import export_site

    n = export_site(
        options.path, options.export, n_samples=options.samples, overwrite=options.overwrite
    )
    print_screen([Done(f"exported {format_count(n, 'sample')} to {escaped(options.export)}")])
    return 0
