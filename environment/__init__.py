"""Environments: the plan, its lock, composition, mutations, and the life of what runs."""
