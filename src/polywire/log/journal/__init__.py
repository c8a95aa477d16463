"""The journal: additions become write batches, write batches become groups, and a start recovers the groups."""
