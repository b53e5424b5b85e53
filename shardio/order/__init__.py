"""Orders: the sample at each position of an epoch.

A `permutation` of all samples, or within windows (`block_shuffle`), of whole shards
(`shard_shuffle`), of groups of clips (`clip_groups`), and of several datasets (`mixture_order`).
`sampling` has the options that choose an order, and weighted draws; `partition` divides positions
among ranks.
"""
