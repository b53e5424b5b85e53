"""dataset.json and its generations: the only commit point of a dataset.

`generation` is what a generation says and how it is written down, `listing` the shards in it,
`commit` how one is published and read, `folder` what the folder may be. Nothing that is published
is ever modified.
"""
