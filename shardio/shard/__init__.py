"""One shard file: `writer` makes it; `opening` and `reader` look into it; `verification` checks it.

`records` has the values that are not stored in columns, found by the shard's index, and
`stored_streams` those of videos and sound, whose packets are read part by part. Nothing here knows
of datasets.
"""
