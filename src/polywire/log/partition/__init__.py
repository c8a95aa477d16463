"""One partition: its numbers and indexes, and the reads of its bytes."""
