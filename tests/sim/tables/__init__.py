"""A table, its writers and a disk."""
