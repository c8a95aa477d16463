"""Replace the system's random numbers by those of the run's seed, and restore them afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from tests.sim.chance import Chance


@contextmanager
def tokens_by(chance: Chance) -> Iterator[None]:
    """Let every request for random bytes or numbers inside the block use this sequence."""
    before = secrets.token_bytes, secrets.randbelow
    secrets.token_bytes = lambda nbytes=None: chance.token(32 if nbytes is None else nbytes)
    secrets.randbelow = lambda exclusive_upper_bound: chance.below(exclusive_upper_bound)
    try:
        yield
    finally:
        secrets.token_bytes, secrets.randbelow = before
