"""What plugs into containerd: the gRPC client, the snapshotter and the NRI plugin."""
