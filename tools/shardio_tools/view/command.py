"""Show a dataset in the browser.

Serves a page with the fields, counts and classes, a grid of all samples, every field of a sample,
what a loader delivers, and damage. Prints a link, opens it, and runs until Ctrl-C. Only this
machine is served, and only with the token in the link. Nothing is written without --writable.

Examples:
    shardio view out/
    shardio view out/ --writable                  # marks become named subsets
    shardio view out/ --loader train.py:loader    # the samples of your loader
    shardio view s3://bucket/set --no-open --port 8000
"""

from __future__ import annotations

import argparse
import secrets
import webbrowser

from shardio import InvalidArgument
from shardio.errors import import_extra
from shardio_tools.output import flush, print_error, print_out, utf8_name

_HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset: a folder, or its URL")
    add("--host", metavar="HOST", default=_HOST, help=f"address to listen at (default: {_HOST})")
    add("--port", type=int, metavar="N", default=0, help="port to listen at (default: a free one)")
    add("--no-open", action="store_true", help="only print the link")
    add("--writable", action="store_true", help="let the page save marks as named subsets")
    add(
        "--loader",
        type=utf8_name,
        metavar="FILE.py:NAME",
        help="a ShardLoader, or a dict of its options, in a file that is then executed",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal arrives, and return the exit code."""
    if not 0 <= options.port < 1 << 16:
        raise InvalidArgument(f"--port must be from 0 to 65535; found {options.port}")
    import_extra("shardio view needs Starlette and uvicorn", "view", "starlette", "uvicorn")
    from shardio_tools.view.app import Viewer, make_app
    from shardio_tools.view.security import Security, is_local
    from shardio_tools.view.server import ViewServer

    server = ViewServer(options.host, options.port)
    with Viewer(options.path, is_writable=options.writable) as viewer, server.stopped_by_signals():
        token = secrets.token_urlsafe(32)
        guarded = Security(
            make_app(viewer), token, options.host, server.port, is_writable=options.writable
        )
        if not is_local(options.host):
            print_error(
                f"warning: {options.host} can be reached by other machines, over a connection that "
                "is not encrypted: whoever sees the link can read the dataset",
                "warning",
            )
        name = f"[{options.host}]" if ":" in options.host else options.host
        link = f"http://{name}:{server.port}/?token={token}"
        print_out(link)
        flush()
        if not options.no_open:
            webbrowser.open(link)
        server.run(guarded)
    return 0
