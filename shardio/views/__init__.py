"""Views of a dataset: its samples are rows, clips of videos, or windows of packed tokens.

Users choose one with a `shardio.Clip`, a `Pack` and a `Sound`.
"""

from shardio.views.packing import Pack
from shardio.views.sounds import Sound

__all__ = ["Pack", "Sound"]
