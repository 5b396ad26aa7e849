"""A thin typed gRPC client of containerd, and the schema of its messages."""

import os

# gRPC's own fork handlers, which it has unless it is told before it is loaded, crash children of a process that has used it
# asynchronously now and then, whatever those do.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
