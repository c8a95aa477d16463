"""The Iggy protocol."""
