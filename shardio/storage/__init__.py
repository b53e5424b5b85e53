"""Local files: all changes to the file system (`fs`), and two ways to read: `mmap` and `pread`.

`file_access` opens files and chooses between the two; `content` gives readers one interface for
both; `fs` also reads and writes the small files of manifests.
"""
