"""The Cursus wire."""
