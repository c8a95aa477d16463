"""The journal: additions become write batches, write batches become groups in slots, and a start recovers the groups."""
