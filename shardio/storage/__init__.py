"""Local files: all that changes a file system (`fs`), and two ways to read: `mmap` and `pread`.

`files` opens a file and recognizes it later; `content` and `columns` are what readers see of either
way; `filesystems` says which one is the default.
"""
