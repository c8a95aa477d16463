"""The `polywire` protocol, in which clients send and receive batches as they are stored (docs/specs/polywire.md)."""
