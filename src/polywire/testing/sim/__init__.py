"""A simulated world: one thread, virtual time, a disk that loses what was not synced, and one number that decides everything.

``python -m polywire.testing.sim --seed 7`` runs the log in it and tells the story.
"""
