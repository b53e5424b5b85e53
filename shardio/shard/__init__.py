"""One shard file: writing, opening, reading and verifying it. Independent of datasets."""
