"""One partition: its offsets and indexes, and reads of its records."""
