"""Runs the command line: `python -m shardio`."""

from shardio_tools.cli import main

raise SystemExit(main())
