"""The journal: additions are collected in write batches, each write batch is written as one group, and a start recovers
the groups.
"""
