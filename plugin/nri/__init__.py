"""Elastic provisioning: empty in this version."""
