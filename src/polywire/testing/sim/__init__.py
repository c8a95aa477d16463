"""Simulated worlds: one thread, virtual time, a disk that loses what was not synced, and one number that decides everything.

``python -m polywire.testing.sim --seed 7`` runs them and tells their stories.
"""
