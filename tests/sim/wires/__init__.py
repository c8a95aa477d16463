"""Protocols and connections in the simulation, over a network that delays, cuts and half-closes (decision 0122)."""
