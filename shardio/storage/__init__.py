"""Local files: all changes to the file system (`fs`), and two access methods, "mmap" and "pread".

`file_access` opens files and chooses the access method; `content` gives readers one interface for
both methods; `fs` also reads and writes the small files of manifests.
"""
