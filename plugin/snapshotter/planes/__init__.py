"""How a layer becomes a directory: the plane protocol and its implementations."""
