"""The Iggy wire."""
