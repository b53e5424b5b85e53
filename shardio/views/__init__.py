"""Views of a dataset: its samples are rows, clips of videos, or windows of packed tokens.

Select one with a `shardio.Clip` or a `Pack`; a `Sound` sets the format of audio.
"""

from shardio.media.audio import Sound
from shardio.views.packing import Pack

__all__ = ["Pack", "Sound"]
