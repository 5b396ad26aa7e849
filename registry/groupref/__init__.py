"""Layer groups: components published apart, as ordinary OCI images, to be stacked when an environment starts."""
