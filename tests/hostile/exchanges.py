"""Byte streams of clients of each protocol: requests of the specifications and of the fuzz targets.

A stream depends on its random numbers only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

from polywire.protocols.cursus.messages import frame
from polywire.protocols.kafka.messages import Codec
from polywire.protocols.polywire.codec import MAGIC
from tests.fuzz import fuzz_cursus, fuzz_flux, fuzz_iggy, fuzz_kafka07, fuzz_polywire
from tests.permissions.cases import cases
from tests.unit.protocols.iggy.dialogue import headered
from tests.unit.protocols.kafka.requests import produce_frame, requests
from tests.vectors.cursus import test_vectors as cursus_vectors
from tests.vectors.flux import test_vectors as flux_vectors
from tests.vectors.iggy.test_protocol_012 import REGISTER as REGISTER_012
from tests.vectors.iggy.test_today import REGISTER

REQUESTS_MAX: Final = 6  # of one stream

Stream = Callable[[random.Random], bytes]


def _flux() -> Stream:
    recorded = [step.data for name in ("worked.txt", "rules.txt") for step in flux_vectors.read_steps(name)]
    return _any_of([*fuzz_flux.GOOD, *recorded])


def _cursus() -> Stream:
    recorded = [step.body for name in cursus_vectors.FILES for step in cursus_vectors.read_steps(name)]
    bodies = [*fuzz_cursus.COMMANDS, *fuzz_cursus.BATCHES, *recorded]
    return _any_of([frame(body) for body in bodies])


def _iggy() -> Stream:
    classic, framed = _any_of([*fuzz_iggy.CLASSIC, *fuzz_iggy.LOGINS]), _any_of(fuzz_iggy.TODAY)
    today = _any_of(fuzz_iggy.TODAY_012)

    def stream(chance: random.Random) -> bytes:
        which = chance.random()
        if which < 0.2:
            return headered(1, REGISTER) + framed(chance)
        if which < 0.5:
            return headered(1, REGISTER_012) + today(chance)
        return chance.choice(fuzz_iggy.LOGINS) + classic(chance)

    return stream


def _http() -> Stream:
    """Return pipelined requests of all kinds."""
    return _any_of([case.request for case in cases() if case.wire == "http" and isinstance(case.request, bytes)])


def _kafka() -> Stream:
    asked = [asked.frame for asked in requests("t", "u")]
    return _any_of([*asked, *(produce_frame("u", codec=codec, acks=acks) for codec in Codec for acks in (0, 1, -1))])


def _kafka07() -> Stream:
    return lambda chance: b"".join(fuzz_kafka07.good(chance) for _ in range(chance.randrange(1, REQUESTS_MAX)))


def _polywire() -> Stream:
    frames = _any_of(fuzz_polywire.FRAMES)
    return lambda chance: MAGIC + frames(chance)


def _any_of(requests: list[bytes]) -> Stream:
    return lambda chance: b"".join(chance.choices(requests, k=chance.randrange(1, REQUESTS_MAX)))


STREAMS: Final[Mapping[str, Stream]] = {
    "flux": _flux(),
    "cursus": _cursus(),
    "http": _http(),
    "iggy": _iggy(),
    "kafka": _kafka(),
    "kafka07": _kafka07(),
    "polywire": _polywire(),
}
