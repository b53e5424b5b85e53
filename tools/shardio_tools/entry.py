"""The entry point of the command `shardio`."""

from __future__ import annotations

import signal


def main() -> int:
    """Load the command line and run it with this process's arguments; return the exit code.

    While modules are loaded, which takes 0.3 s, SIGINT has its default action, because Ctrl-C would
    otherwise print a traceback. If SIGINT is ignored at the start, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shardio_tools import cli

    try:
        return cli.main(on_loaded=_hear_ctrl_c)
    except KeyboardInterrupt:  # while output is flushed
        return cli.INTERRUPTED


def _hear_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
