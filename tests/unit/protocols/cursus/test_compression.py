"""Compressed frames: detection, configuration, damage and size limits."""

from __future__ import annotations

import json
import tracemalloc
import zlib

import pytest

from polywire.errors import Invalid, PeerError
from polywire.protocols.cursus import long_frame
from polywire.protocols.cursus.compression import Algorithm, algorithm, register, sniffed
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.cursus.messages import enveloped, frame
from polywire.protocols.cursus.reply_slots import PACKED_HERE_BYTES_MAX
from polywire.protocols.runtime.off_loop import LARGE_BYTES, LONG_BYTES
from tests.processor import processor_used
from tests.unit.protocols.cursus.dialogue import World
from tests.unit.protocols.cursus.test_produce import batch, messages, stored

LIST = {
    "gzip": "1f8b0800000000000203 6360f0f10c0e0100136bdbe206000000",
    "lz4": "04224d18 684006000000000000005906000080 00004c495354 00000000",
    "xerial": "82534e4150505900 00000001 00000001 00000008 061400004c495354",
    "zstd": "28b52ffd 2006 310000 0000 4c495354",
    "snappy": "061400004c495354",
}


def expanded(name: str, bodies: list[bytes]) -> list[bytes]:
    """Return the decompressed bodies."""
    return [bytes(algorithm(name).expand(memoryview(body), 64 << 20)) for body in bodies]


@pytest.mark.parametrize("name", ["gzip", "lz4", "xerial", "zstd"])
def test_compression_is_detected_by_the_first_bytes(name: str) -> None:
    peer = World().connect()
    assert expanded(name, peer.say(bytes.fromhex(LIST[name]))) == [b"(no topics)"]
    peer.ask("CREATE topic=orders partitions=1")
    packed = algorithm(name).compress(batch("orders", 0, messages(1, 2)))
    assert json.loads(peer.ask(packed))["last_offset"] == 1


def test_a_raw_block_is_accepted_if_configured() -> None:
    peer = World(cursus=CursusSettings(compression="snappy")).connect()
    assert expanded("snappy", peer.say(bytes.fromhex(LIST["snappy"]))) == [b"(no topics)"]
    peer.feed(frame(b"LIST"))
    assert peer.gave_up


@pytest.mark.parametrize("name", ["gzip", "lz4", "xerial", "zstd", "snappy"])
def test_every_algorithm_round_trips(name: str) -> None:
    known = algorithm(name)
    data = bytes(range(256)) * 5000
    packed = known.compress(data)
    assert known.expand(memoryview(packed), len(data)) == data
    with pytest.raises(PeerError, match="exceeds the size limit"):
        known.expand(memoryview(packed), len(data) - 1)
    for cut in (1, len(packed) // 2, len(packed) - 1):
        with pytest.raises(PeerError):
            known.expand(memoryview(packed[:-cut]), len(data))
    assert (sniffed(memoryview(packed)) is known) is bool(known.magic)


def test_the_framing_format_of_snappy_is_refused() -> None:
    peer = World().connect()
    peer.ask("PROTOCOL_INFO")
    assert peer.ask(bytes.fromhex("ff060000734e61507059")).startswith("ERROR: decode_failed")


@pytest.mark.parametrize("name", ["gzip", "lz4", "xerial", "zstd"])
def test_responses_of_the_legacy_dialect_use_the_requests_compression(name: str) -> None:
    peer = World().connect()
    for text, answer in (
        (b"CREATE orders 1", "\u2705 Topic 'orders' now has 1 partitions"),
        (b"PUBLISH orders x", "\U0001f4e4 Published to 'orders'"),
        (b"DELETE none", "ERROR: topic 'none' not found"),
        (b"LIST", "orders"),
    ):
        (found,) = expanded(name, peer.say(algorithm(name).compress(enveloped("admin", text))))
        assert found.decode() == answer
    assert peer.ask("LIST", "admin") == "orders"
    assert peer.ask(algorithm(name).compress(b"LIST_GROUPS")) == "OK count=0 groups="


@pytest.mark.parametrize("goes", [False, True])
def test_a_long_response_is_compressed_off_the_event_loop(goes: bool) -> None:
    world = World()
    peer, other = world.connect(), world.connect()
    names = [f"{number}".zfill(100) for number in range(PACKED_HERE_BYTES_MAX // 100)]
    for name in names:
        peer.ask(f"CREATE topic={name} partitions=1")
    peer.feed(frame(algorithm("gzip").compress(enveloped("admin", b"LIST"))) + frame(enveloped("admin", b"HELP")))
    assert peer.take_bodies() == []
    if goes:
        peer.session.close()
    peer.pass_by()
    answers = peer.take_bodies()
    assert len(answers) == (0 if goes else 2)
    if not goes:
        assert sorted(expanded("gzip", answers[:1])[0].decode().split(", ")) == names
        assert answers[1].startswith(b"Available commands:")
    json.loads(other.ask(algorithm("gzip").compress(batch(names[0], 0, messages(1)))))


@pytest.mark.parametrize("name", ["gzip", "lz4", "xerial", "zstd"])
def test_a_text_that_is_too_long_is_copied_once_only(name: str) -> None:
    size = 60 << 20
    packed = algorithm(name).compress(bytes(size))
    peer = World().connect()
    peer.ask("PROTOCOL_INFO")
    tracemalloc.start()
    try:
        assert peer.ask(packed) == 'ERROR: malformed_input reason="command is too long" command='
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * size


def test_users_can_register_algorithms_by_name() -> None:
    def expand(body: memoryview, limit: int) -> bytes:
        return zlib.decompress(body[2:])

    register(Algorithm("zlib", expand, lambda body: b"\xfe\x01" + zlib.compress(body), b"\xfe\x01"))
    peer = World().connect()
    assert peer.say(algorithm("zlib").compress(b"LIST_GROUPS")) == [b"OK count=0 groups="]
    with pytest.raises(Invalid, match="magic is ambiguous"):
        register(Algorithm("bad", expand, bytes, b"LI"))
    with pytest.raises(Invalid, match="unknown compression name=none-such"):
        algorithm("none-such")


def large_batch(size: int, value_size: int = 2_000) -> tuple[bytes, int]:
    """Return a batch of about that many bytes, and its number of messages."""
    count = size // value_size
    return batch(
        "orders", 0, [{"seq": n, "pid": "p", "payload": b"v" * value_size} for n in range(1, count + 1)]
    ), count


@pytest.mark.parametrize("name", ["", "gzip", "lz4", "xerial", "zstd"])
def test_a_large_frame_delays_its_own_connection_only(name: str) -> None:
    world = World()
    peer, other = world.connect(), world.connect()
    peer.ask("CREATE topic=orders partitions=1")
    body, count = large_batch(3 * LARGE_BYTES if name else 3 * LONG_BYTES)
    peer.feed(frame(algorithm(name).compress(body) if name else body) + frame(b"LIST") + frame(b"HELP"))
    assert peer.take_bodies() == []
    assert other.ask("LIST") == "orders", "other connections do not wait"
    peer.pass_by()
    acknowledged, listed, helped = peer.take_bodies()
    assert json.loads(acknowledged)["last_offset"] == count - 1
    assert listed.startswith(b"OK count=1")
    assert helped
    assert peer.pins == 0
    assert [record.value for record in stored(world, "orders")] == [b"v" * 2_000] * count


def test_a_very_large_batch_is_stored_in_turns_with_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_frame, "STEP_S", 0.0)  # the simulated clock does not advance meanwhile
    world = World()
    peer, other = world.connect(), world.connect()
    peer.ask("CREATE topic=orders partitions=1")
    body, count = large_batch(40 << 20)
    peer.feed(frame(body))
    seen = set()
    for _ in range(100):
        world.memory.loop.run_pass()  # type: ignore[attr-defined]
        other.feed(frame(b"LIST"))
        other.take_bodies()
        seen.add(world.memory.broker.topic("orders").partitions[0].log.next_offset)
    assert len(seen) > 5
    assert json.loads(peer.take_bodies()[0])["last_offset"] == count - 1


def test_a_batch_is_stored_completely_if_its_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_frame, "STEP_S", 0.0)
    world = World()
    peer = world.connect()
    peer.ask("CREATE topic=orders partitions=1")
    body, count = large_batch(40 << 20)
    peer.feed(frame(body))
    for _ in range(3):
        world.memory.loop.run_pass()  # type: ignore[attr-defined]
    peer.session.close()
    peer.pass_by()
    assert world.memory.broker.topic("orders").partitions[0].log.next_offset == count
    assert peer.pins == 0


@pytest.mark.parametrize("half_way", [False, True])
def test_a_client_that_disconnects_while_its_frame_is_decompressed(half_way: bool) -> None:
    world = World()
    peer = world.connect()
    peer.ask("CREATE topic=orders partitions=1")
    packed = algorithm("lz4").compress(large_batch(3 * LARGE_BYTES)[0])
    peer.feed(frame(packed))
    if half_way:
        world.memory.run()
    peer.session.close()
    peer.pass_by()
    assert peer.pins == 0
    next_one = world.connect()
    assert json.loads(next_one.ask(packed))["status"] == "OK", "nothing remains off the loop"


def test_a_half_closed_client_gets_the_response_to_its_large_frame() -> None:
    world = World()
    peer = world.connect()
    peer.ask("CREATE topic=orders partitions=1")
    body, count = large_batch(3 * LARGE_BYTES)
    peer.feed(frame(algorithm("gzip").compress(body)) + frame(b"LIST"))
    peer.finish()
    acknowledged, listed = peer.take_bodies()
    assert json.loads(acknowledged)["last_offset"] == count - 1
    assert listed.startswith(b"OK")
    assert peer.closed


def test_a_large_frame_for_a_topic_that_is_created_later() -> None:
    world = World()
    peer, other = world.connect(), world.connect()
    peer.feed(frame(algorithm("gzip").compress(large_batch(3 * LARGE_BYTES)[0])))
    peer.pass_by()
    assert peer.take_bodies() == []
    other.ask("CREATE topic=orders partitions=1")
    world.memory.advance(0.1)
    peer.pass_by()
    assert json.loads(peer.take_bodies()[0])["status"] == "OK"
    lost = world.connect()
    lost.feed(frame(algorithm("gzip").compress(large_batch(3 * LARGE_BYTES)[0].replace(b"orders", b"absent"))))
    for _ in range(40):
        lost.pass_by()
        world.memory.advance(0.05)
    lost.pass_by()
    assert lost.take_bodies()[0].startswith(b"ERROR: topic_not_found")
    assert lost.pins == peer.pins == 0


def test_a_large_frame_that_expands_beyond_the_limit_closes_the_connection() -> None:
    world = World()
    for name in ("gzip", "lz4", "xerial", "zstd"):
        peer = world.connect()
        peer.feed(frame(algorithm(name).compress(bytes(65 << 20))))
        peer.pass_by()
        assert peer.gave_up, name
        assert peer.pins == 0


@pytest.mark.parametrize("name", ["gzip", "xerial", "zstd"])
def test_many_tiny_parts_are_refused_quickly(name: str) -> None:
    part = algorithm(name).compress(b"")
    bomb = part * 1_000_000 if name != "xerial" else part[:16] + part[16:] * 2_000_000
    with processor_used() as used, pytest.raises(PeerError):
        algorithm(name).expand(memoryview(bomb), 64 << 20)
    assert used.seconds < 5.0
