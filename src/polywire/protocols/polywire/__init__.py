"""The `polywire` protocol: stored batches, unchanged, in both directions (docs/specs/polywire.md)."""
