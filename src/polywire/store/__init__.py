"""Immutable named blobs."""
