"""The history of partitions."""
