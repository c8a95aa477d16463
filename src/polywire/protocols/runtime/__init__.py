"""Code that the sessions of all protocols share (README.md)."""
