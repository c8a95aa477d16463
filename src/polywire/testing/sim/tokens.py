"""What a run would ask the system's random numbers for: tokens that follow from the number of the run.

Promises: what was there before is back afterwards. Must not know: what tokens are for.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from polywire.testing.sim.chance import Chance


@contextmanager
def tokens_by(chance: Chance) -> Iterator[None]:
    """While it lasts, whoever asks for random bytes or numbers is given those of this chance."""
    before = secrets.token_bytes, secrets.randbelow
    secrets.token_bytes = lambda nbytes=None: chance.token(32 if nbytes is None else nbytes)
    secrets.randbelow = lambda exclusive_upper_bound: chance.below(exclusive_upper_bound)
    try:
        yield
    finally:
        secrets.token_bytes, secrets.randbelow = before
