"""The record format: stored batches."""
