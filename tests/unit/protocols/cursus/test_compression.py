"""Compressed frames: sniffed, set, damaged, too large."""

from __future__ import annotations

import json
import tracemalloc
import zlib

import pytest

from polywire.errors import Invalid, PeerError
from polywire.protocols.cursus.compression import Algorithm, algorithm, register, sniffed
from polywire.protocols.cursus.messages import frame
from polywire.protocols.cursus.state import CursusSettings
from tests.unit.protocols.cursus.dialogue import World
from tests.unit.protocols.cursus.test_publishing import batch, messages

LIST = {
    "gzip": "1f8b0800000000000203 6360f0f10c0e0100136bdbe206000000",
    "lz4": "04224d18 684006000000000000005906000080 00004c495354 00000000",
    "xerial": "82534e4150505900 00000001 00000001 00000008 061400004c495354",
    "snappy": "061400004c495354",
}


@pytest.mark.parametrize("name", ["gzip", "lz4", "xerial"])
def test_frames_are_recognised_by_their_first_bytes(name: str) -> None:
    peer = World().connect()
    assert peer.say(bytes.fromhex(LIST[name])) == [b"OK count=0 topics="]
    peer.ask("CREATE topic=orders partitions=1")
    packed = algorithm(name).compress(batch("orders", 0, messages(1, 2)))
    assert json.loads(peer.ask(packed))["last_offset"] == 1


def test_a_raw_block_is_taken_when_the_listener_is_set_to_it() -> None:
    peer = World(cursus=CursusSettings(compression="snappy")).connect()
    assert peer.say(bytes.fromhex(LIST["snappy"])) == [b"OK count=0 topics="]
    peer.feed(frame(b"LIST"))
    assert peer.gave_up


@pytest.mark.parametrize("name", ["gzip", "lz4", "xerial", "snappy"])
def test_every_algorithm_gives_back_what_it_took(name: str) -> None:
    known = algorithm(name)
    data = bytes(range(256)) * 5000
    packed = known.compress(data)
    assert known.expand(memoryview(packed), len(data)) == data
    with pytest.raises(PeerError, match="expands too far"):
        known.expand(memoryview(packed), len(data) - 1)
    for cut in (1, len(packed) // 2, len(packed) - 1):
        with pytest.raises(PeerError):
            known.expand(memoryview(packed[:-cut]), len(data))
    assert (sniffed(memoryview(packed)) is known) is bool(known.magic)


def test_the_framing_format_of_snappy_is_refused() -> None:
    peer = World().connect()
    assert peer.ask(bytes.fromhex("ff060000734e61507059")).startswith("ERROR: decode_failed")


@pytest.mark.parametrize("name", ["gzip", "lz4", "xerial"])
def test_a_text_that_is_too_long_takes_memory_once(name: str) -> None:
    size = 60 << 20
    packed = algorithm(name).compress(bytes(size))
    peer = World().connect()
    tracemalloc.start()
    try:
        assert peer.ask(packed) == 'ERROR: malformed_input reason="command is too long" command='
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * size


def test_users_add_algorithms_by_name() -> None:
    def expand(body: memoryview, limit: int) -> bytes:
        return zlib.decompress(body[2:])

    register(Algorithm("zlib", expand, lambda body: b"\xfe\x01" + zlib.compress(body), b"\xfe\x01"))
    peer = World().connect()
    assert peer.say(algorithm("zlib").compress(b"LIST")) == [b"OK count=0 topics="]
    with pytest.raises(Invalid, match="may begin an uncompressed frame"):
        register(Algorithm("bad", expand, bytes, b"LI"))
    with pytest.raises(Invalid, match="unknown compression name=none-such"):
        algorithm("none-such")
