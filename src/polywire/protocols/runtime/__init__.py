"""What the sessions of all wires share (README.md)."""
