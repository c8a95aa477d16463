"""The Iggy wire without a socket."""
