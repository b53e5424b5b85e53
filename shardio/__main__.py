"""Runs the command line: `python -m shardio`."""

from shardio_tools.entry import main

raise SystemExit(main())
