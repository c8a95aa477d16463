"""The journal: write batches of appends to preallocated files, each in one atomic write, and recover them at a
start."""
