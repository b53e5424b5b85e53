"""The client of a server of batches: connection, messages, and loaders that receive batches.

`shardio.serving` is the other side. Nothing here ever pickles: the network carries JSON and bytes,
checked before use.
"""
