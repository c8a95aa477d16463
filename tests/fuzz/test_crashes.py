"""Inputs that once broke a decoder are decoded or refused, and every decoder decodes its valid samples."""

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
def test_inputs_that_once_broke_a_decoder_are_refused(name: str) -> None:
    run(DECODERS[name.rpartition("-")[0]], (CRASHES / name).read_bytes())


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=lambda decoder: decoder.name)
def test_valid_input_is_decoded_and_damaged_input_is_not_fatal(decoder: Decoder) -> None:
    assert decoder.samples
    read = 0
    for sample in decoder.samples:
        try:
            decoder.decode(sample)
            read += 1
        except decoder.refusals:
            continue
    assert read, "some sample is valid"
    for seed in range(ROUNDS):
        check(decoder, random.Random(seed))
