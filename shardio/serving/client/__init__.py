"""The client of a server of batches: the connection, messages, and loaders that receive batches.

The server is in `shardio.serving`. Nothing is pickled: a message consists of JSON and raw bytes,
which are checked before they are used.
"""
