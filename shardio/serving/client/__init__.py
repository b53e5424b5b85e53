"""Batches that another machine decodes: what both sides say to each other, and who receives.

`shardio.serving` is the other side. Nothing here ever pickles: what comes from the network is JSON
and bytes, checked before anything is made of it.
"""
