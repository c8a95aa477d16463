"""The log of all partitions of one shard."""
