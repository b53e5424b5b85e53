"""How the bytes of a shard are got at: through a map, or by reads into buffers.

`files` opens a file and knows it again; `content` and `columns` are what readers see of either way;
`pread` is the second, and `filesystems` says where it is the default. The first is in `storage`.
"""
