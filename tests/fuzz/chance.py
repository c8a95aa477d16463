"""Common parts of the fuzz targets: damage, and rounds until the time is up.

A round depends on its seed only, and the seed of a failing round is printed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence


def damaged(data: bytes, chance: random.Random, *, times_max: int, odd: Sequence[bytes] = (), front: int = 0) -> bytes:
    """Return the bytes with up to so many flips, cuts and insertions from ``front`` on, some of ``odd`` bytes."""
    spoilt = bytearray(data)
    for _ in range(chance.randrange(times_max + 1)):
        place = chance.randrange(front, len(spoilt) + 1)
        match chance.randrange(4):
            case 0 if place < len(spoilt):
                spoilt[place] ^= 1 << chance.randrange(8)
            case 1:
                del spoilt[place : place + chance.randrange(20)]
            case 2 if odd:
                spoilt[place:place] = chance.choice(odd)
            case _:
                spoilt[place:place] = chance.randbytes(chance.randrange(9))
    return bytes(spoilt)


def cuts_of(stream: Sequence[object], chance: random.Random) -> list[int]:
    """Return where to split a stream into up to five pieces, some of them empty."""
    return sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(5)))


def fuzz(check: Callable[[random.Random], object]) -> None:
    """Run rounds for FUZZ_SECONDS (10), beginning with the seed FUZZ_SEED."""
    seed = int(os.environ.get("FUZZ_SEED") or random.randrange(2**32))
    deadline = time.monotonic() + float(os.environ.get("FUZZ_SECONDS") or 10)
    rounds = 0
    print(f"seed={seed}", flush=True)
    while time.monotonic() < deadline:
        try:
            check(random.Random(seed + rounds))
        except BaseException:
            print(f"failed, repeat with FUZZ_SEED={seed + rounds}", flush=True)
            raise
        rounds += 1
    print(f"rounds={rounds}")
