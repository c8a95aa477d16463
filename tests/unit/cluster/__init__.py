"""The log in a bucket, without a disk or a network."""
