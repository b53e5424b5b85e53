"""Local files: all changes to the file system, and two methods to read shards: "mmap" and "pread".

With "mmap", a file is mapped into memory; with "pread", its parts are read by offset. `file_access`
chooses the method for a file, opens it and maps it. `content` gives readers the same interface for
both methods. `fs` makes all changes to the file system, and reads and writes the small files of
manifests.
"""
