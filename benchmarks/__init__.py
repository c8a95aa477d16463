"""Workloads that anyone can rerun: ``make bench``."""
