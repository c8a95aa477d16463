"""The stored batch: the format of records on disk and in memory."""
