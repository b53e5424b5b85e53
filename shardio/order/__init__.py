"""Orders: the sample at each position of an epoch.

A `permutation` of all samples, within windows of runs or of shards (`shuffle`),
of groups of clips (`clip_groups`), and of several datasets (`mixture_order`).
`sampling` has the options that choose an order, and weighted draws; `partition` divides positions
among ranks.
"""
