"""Logs in a bucket: leadership of their shards, and their journals, segments and snapshots as objects."""
