"""Unit tests of the Iggy protocol, without a socket."""
