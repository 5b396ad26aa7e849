"""The FUSE data server: one file per layer, the layer's tar stream, fetched when read."""
