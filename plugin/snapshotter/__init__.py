"""The proxy snapshotter and its FUSE data server."""
