"""Local files: all changes to the file system (`fs`), and two access methods, "mmap" and "pread".

`file_access` chooses the access method, and opens and maps files; `content` gives readers one
interface for both methods; `fs` also reads and writes the small files of manifests.
"""
