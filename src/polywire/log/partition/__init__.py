"""One partition: its numbers and indexes, and where a reader's bytes come from."""
