"""The one record format."""
