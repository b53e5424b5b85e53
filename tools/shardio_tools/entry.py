"""Entry point of the command `shardio`: Ctrl-C ends it silently until it is loaded."""

from __future__ import annotations

import signal


def main() -> int:
    """Load the command line and run it with this process's arguments; return the exit code.

    Loading takes 0.3 s. Ctrl-C during an import printed a traceback, and inside NumPy the advice to
    reinstall it; so until then the signal has its default action. If the parent process ignores the
    signal, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shardio_tools import cli

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return cli.main()
    except KeyboardInterrupt:  # while arguments are parsed, or output is flushed
        return cli.INTERRUPTED
