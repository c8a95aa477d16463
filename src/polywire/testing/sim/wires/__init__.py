"""Wires and connections in the simulated world: peers that speak over a network that delays, cuts and half-closes (decision 0122)."""
