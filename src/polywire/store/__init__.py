"""Storage: immutable files (blobs) in a directory or a bucket, and objects in buckets."""
