"""Views of a dataset: its samples are rows, clips of videos, or windows of packed tokens.

Users choose one with a `shardio.Clip`, a `Pack` and a `Sound`.
"""

from shardio.views.audio_options import Sound
from shardio.views.packing import Pack

__all__ = ["Pack", "Sound"]
