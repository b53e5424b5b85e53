"""One shard file: `writer` writes it, `reader` reads it, `verification` checks its hashes.

`opening` validates the structure of a file when it is opened. `section_writers` has a writer for
each kind of section of a shard. `records` reads the values that are not stored in columns, such as
texts, and the packets of videos and audio. This package does not depend on datasets.
"""
