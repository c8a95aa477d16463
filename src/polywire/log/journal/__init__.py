"""The journal: what is added becomes write batches, write batches become groups in slots, and all of it is found again by a start."""
