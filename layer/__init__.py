"""The layer blob format: tar scan, TOC, seekable zstd frames, EROFS metadata, verification.

Pure functions over bytes and files: nothing here opens a socket, starts a process or needs root.
"""
