"""The `polywire` wire: stored batches, verbatim, in both directions (docs/protocols/polywire.md)."""
