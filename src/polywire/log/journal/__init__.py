"""The journal: write batches that become groups in preallocated files, and the recovery of the groups at a start."""
