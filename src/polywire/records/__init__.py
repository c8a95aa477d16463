"""The record format."""
