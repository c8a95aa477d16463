"""Storage of immutable named blobs, and of objects in buckets."""
