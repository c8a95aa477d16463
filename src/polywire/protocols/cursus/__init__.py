"""The Cursus protocol."""
