"""The orders of samples: for each position of an epoch, the sample that comes there.

A `permutation` of all samples, or within windows (`block_shuffle`), of whole shards
(`shard_shuffle`), of groups of clips (`clip_groups`); by weights (`weighted`), and of several
datasets (`mixture_order`). `partition` divides the positions among ranks; `choice` is what a user
asked for.
"""
