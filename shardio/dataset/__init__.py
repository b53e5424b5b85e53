"""A dataset: a folder of shards, opened; rows of many of them read at once; and what adds to it.

`manifest`, beside this package, has the generations that say which shards a dataset has.
"""
