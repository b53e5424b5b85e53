"""What of a dataset counts as its samples: rows, clips of videos, or windows of packed tokens.

Users say so with a `shardio.Clip`, a `Pack` and a `Sound`.
"""

from shardio.views.packing import Pack
from shardio.views.sounds import Sound

__all__ = ["Pack", "Sound"]
