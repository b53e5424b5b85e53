"""One shard file: `writer` makes it, `reader` reads it, `verification` checks its hashes.

`opening` validates the structure of a file, `section_writers` write its sections. `records` finds
the values that are not stored in columns; `streams` reads the packets of videos and audio. Nothing
here knows datasets.
"""
