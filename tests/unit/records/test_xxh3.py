"""XXH3 against the reference library, for every length class."""

from __future__ import annotations

import random

import pytest
import xxhash

from polywire.records.xxh3 import xxh3, xxh3_own

SIZES = [*range(600), 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 4096, 10_000]


@pytest.mark.parametrize("digest", [xxh3, xxh3_own])
def test_digests_match_the_reference_library(digest: object) -> None:
    data = random.Random(7).randbytes(max(SIZES))
    for size in SIZES:
        assert digest(data[:size]) == xxhash.xxh3_64_intdigest(data[:size]), size  # type: ignore[operator]
