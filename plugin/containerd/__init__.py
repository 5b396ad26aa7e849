"""A thin typed gRPC client of containerd, and the schema of its messages."""
