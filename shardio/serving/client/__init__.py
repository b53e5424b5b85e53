"""The client of a server of batches: connection, messages, and loaders that receive batches.

`shardio.serving` has the server. Nothing is pickled: messages are JSON and raw bytes, checked
before use.
"""
