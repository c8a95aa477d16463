"""The `polywire` wire: stored batches, verbatim, in both directions (docs/specs/polywire.md)."""
