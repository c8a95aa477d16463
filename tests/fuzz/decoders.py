"""Common parts of the fuzz targets of single decoders: samples, damage to lengths and numbers, and failing inputs.

Every input is decoded or refused as the decoder documents. An input that breaks a decoder is written to ``crashes``,
from where ``test_crashes`` reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

from tests.fuzz.chance import damaged

CRASHES: Final = Path(__file__).parent / "crashes"
BYTES_MAX: Final = 1 << 20  # of one input
NUMBERS: Final = (
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
)
ODD: Final = (b"", b"\0", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\r\n", b"=" * 8, b'"', b"\\", b"9" * 40, b"-1")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder, valid input for it, and how it refuses invalid input.

    seal: corrects checksums, so that later checks are reached.
    """

    name: str
    decode: Callable[[bytes], object]
    samples: Sequence[bytes]
    refusals: tuple[type[Exception], ...] = ()
    seal: Callable[[bytes], bytes] | None = None


def mutated(decoder: Decoder, chance: random.Random) -> bytes:
    """Return one of the samples, often with several kinds of damage."""
    data = chance.choice(decoder.samples)
    for _ in range(chance.randrange(4)):
        match chance.randrange(5):
            case 0:
                data = damaged(data, chance, times_max=3, odd=ODD)
            case 1:
                data = _with_number(data, chance)
            case 2:
                other = chance.choice(decoder.samples)
                data = data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]
            case 3:
                start = chance.randrange(len(data) + 1)
                part = data[start : start + chance.choice((1, 4, 8, 24, 100))]
                data = data[:start] + part * chance.choice((2, 3, 50)) + data[start:]
            case _:
                data = data[: chance.randrange(len(data) + 1)]
    return data[:BYTES_MAX]


def _with_number(data: bytes, chance: random.Random) -> bytes:
    """Replace a field of some width by an extreme number, or by one near its value."""
    width = chance.choice((1, 2, 4, 8))
    at = chance.randrange(len(data) + 1)
    order: Literal["little", "big"] = "little" if chance.randrange(2) else "big"
    was = int.from_bytes(data[at : at + width], order)
    number = chance.choice((*NUMBERS, was + 1, was - 1, len(data), len(data) - at)) % (1 << 8 * width)
    return data[:at] + number.to_bytes(width, order) + data[at + width :]


def check(decoder: Decoder, chance: random.Random) -> None:
    """Check one input. Raises every error that is no documented refusal, and stores the input."""
    data = mutated(decoder, chance)
    if decoder.seal is not None and chance.randrange(8):
        data = decoder.seal(data)
    try:
        run(decoder, data)
    except BaseException:
        CRASHES.mkdir(exist_ok=True)
        (CRASHES / f"{decoder.name}-{sha256(data).hexdigest()[:16]}").write_bytes(data)
        raise


def run(decoder: Decoder, data: bytes) -> None:
    """Decode the input, or accept a documented refusal."""
    try:
        decoder.decode(data)
    except decoder.refusals:
        return


def one_of_each(decoders: Sequence[Decoder]) -> Callable[[random.Random], None]:
    """Return a round of one input for each decoder."""

    def check_all(chance: random.Random) -> None:
        for decoder in decoders:
            check(decoder, chance)

    return check_all
