"""Local files: all changes to the file system (`fs`), and two ways to read: `mmap` and `pread`.

`file_access` opens files and chooses between the two; `content` is what readers see of either;
`fs` also has the small files of manifests.
"""
