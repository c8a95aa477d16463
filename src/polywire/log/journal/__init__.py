"""The journal: collects additions in write batches, writes these as groups into slots, and recovers the groups at a
start.
"""
