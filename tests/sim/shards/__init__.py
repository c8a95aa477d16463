"""Several shards of one broker, each with a disk, and links between their processes."""
