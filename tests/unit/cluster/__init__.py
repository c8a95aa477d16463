"""Unit tests of the log in a bucket, without a disk or a network."""
