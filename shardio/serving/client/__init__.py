"""The client of a server of batches: connection, messages, and loaders that receive batches.

The server is in `shardio.serving`. Nothing is pickled: messages are JSON and raw bytes, and are
checked before use.
"""
