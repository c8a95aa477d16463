"""Deterministic simulation: one thread, virtual time, a disk that loses unsynced data, and one seed that decides
everything.

``python -m polywire.testing.sim --seed 7`` runs the simulated worlds and prints their events.
"""
