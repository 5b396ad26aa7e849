"""Mutations: what differs from task to task, as a small layer made without starting anything."""
