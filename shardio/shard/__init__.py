"""One shard file: `writer` writes it, `reader` reads it, `verification` checks its hashes.

`opening` validates the structure of a file; `section_writers` write its sections. `records` finds
the values that are not stored in columns, and reads the packets of videos and audio. This package
does not know datasets.
"""
