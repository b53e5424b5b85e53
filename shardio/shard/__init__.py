"""One shard file: `writer` writes it, `reader` opens and reads it, `verification` checks hashes.

`section_writers` write the sections of a shard. `records` finds the values that are not stored in
columns, and reads the packets of videos and audio. This package does not know datasets.
"""
