"""Deterministic simulation of brokers: one thread, virtual time, and one seed that determines everything.

Its disk loses unsynced data. ``python -m tests.sim --seed 7`` runs the simulations and prints their events.
"""
