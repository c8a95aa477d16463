"""Segments: immutable blobs with data that has left the journal; writing, replacing and removing them."""
