"""The composing registry of a node: a read-only OCI distribution endpoint whose images are plans and stacks of groups."""
