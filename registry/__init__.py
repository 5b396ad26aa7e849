"""OCI registries and layouts: references, credentials, manifests, blobs, ranged reads."""
