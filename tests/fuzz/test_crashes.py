"""What once broke a decoder is read or refused ever since, and every decoder reads the good input it is fuzzed with."""

from __future__ import annotations

import random
from typing import Final

import pytest

from tests.fuzz import fuzz_http, fuzz_input, fuzz_logins, fuzz_replies, fuzz_stored
from tests.fuzz.decoders import CRASHES, Decoder, check, run

DECODERS: Final = {
    decoder.name: decoder
    for target in (fuzz_http, fuzz_input, fuzz_logins, fuzz_replies, fuzz_stored)
    for decoder in target.DECODERS
}
FILES: Final = sorted(path.name for path in CRASHES.glob("*"))
ROUNDS: Final = 30


@pytest.mark.parametrize("name", FILES)
def test_what_broke_a_decoder_is_refused(name: str) -> None:
    run(DECODERS[name.rpartition("-")[0]], (CRASHES / name).read_bytes())


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=lambda decoder: decoder.name)
def test_good_input_is_read_and_damaged_input_is_not_fatal(decoder: Decoder) -> None:
    assert decoder.samples
    read = 0
    for sample in decoder.samples:
        try:
            decoder.decode(sample)
            read += 1
        except decoder.refusals:
            continue
    assert read, "some sample is good"
    for seed in range(ROUNDS):
        check(decoder, random.Random(seed))
