"""Where the command `shardio` begins: Ctrl-C ends it without a word until it is loaded."""

from __future__ import annotations

import signal


def main() -> int:
    """Load the command line and run it with this process's arguments; returns the exit code.

    Loading takes 0.3 s. Ctrl-C in the middle of an import was a traceback, and out of NumPy the
    advice to install it anew; so meanwhile the signal ends the process, as it does one without
    Python. Where whoever started this has it ignored, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shardio_tools import cli

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return cli.main()
    except KeyboardInterrupt:  # while arguments are parsed, or what was printed is flushed
        return cli.INTERRUPTED
