"""What all fuzz targets share: damage, and rounds until time is up.

Promises: a round depends on its seed only, and the seed of one that fails is told. Must not know: what is fuzzed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence


def damaged(data: bytes, chance: random.Random, *, times_max: int, odd: Sequence[bytes] = (), front: int = 0) -> bytes:
    """The bytes with some flipped, cut out or put in from ``front`` on, up to so many times; ``odd``: what decoders might stumble over."""
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
    """Where to cut a stream into up to five pieces, some of them empty."""
    return sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(5)))


def fuzz(check: Callable[[random.Random], object]) -> None:
    """Check rounds for FUZZ_SECONDS (10), beginning with the seed FUZZ_SEED."""
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
