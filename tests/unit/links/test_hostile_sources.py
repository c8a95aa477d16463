"""Sources that lie: the link reports an error with the topic, within bounded time and memory, and stores nothing wrong."""

from __future__ import annotations

import asyncio
import random
import resource
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress

import cramjam
import pytest

from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Conflict, Invalid, Missing, PeerError, Unavailable
from polywire.link_orders import LinkDefinition, LinkReport
from polywire.links import topic as topic_module
from polywire.links.topic import LinkedTopic
from polywire.links.worker import Follower
from polywire.protocols.kafka.client_batches import decode_pieces
from polywire.protocols.kafka.compression import compress
from polywire.protocols.kafka.messages import Api, Codec
from polywire.records.batch import validate
from polywire.records.pieces import covering, merged
from polywire.testing.thread import BrokerThread
from tests.unit.links.hostile_kafka import HEAD_BYTES, TOPIC, HostileKafka, batch_at, sealed, with_body
from tests.unit.links.test_topic import as_link

BOMB_BYTES = 256 << 20
GROWTH_KB_MAX = 200 << 10  # of the largest memory of this process, during one test


@pytest.fixture(scope="module")
def target() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire"]) as running:
        yield running


async def step(target: BrokerThread, server: HostileKafka, *, steps: int = 1) -> list[bytes | None]:
    """Make some steps of a link from the server. Return the values of the copy, and delete it."""
    client, writer = await connect(await server.start()), await as_link(target)
    user = await connect(target.url())
    assert isinstance(user, PolywireClient)
    try:
        linked = LinkedTopic(LinkDefinition("test", "kafka://lies", (TOPIC,)), TOPIC, client, writer)
        try:
            for _ in range(steps):
                await linked.step()
        finally:
            exists = TOPIC in [topic.name for topic in await user.topics()]
            found = await user.fetch(TOPIC, 0, 0) if exists and server.first == 0 else []
        return [record.value for record in found]
    finally:
        with suppress(Missing):
            await user.delete_topic(TOPIC)
        for one in (client, writer, user):
            await one.close()
        await server.stop()
        await asyncio.sleep(0)


def descending(_: int) -> bytes:
    return batch_at(5) + batch_at(2)


def deltas(*numbers: int, last: int) -> bytes:
    """Return a batch whose records have these offset deltas, below 64."""
    batch = bytearray(batch_at(0, [b""] * len(numbers)))
    for row, number in enumerate(numbers):
        at = HEAD_BYTES + row * (len(batch) - HEAD_BYTES) // len(numbers)
        assert batch[at + 3] == 2 * row
        batch[at + 3] = 2 * number
    return sealed(batch, last_delta=last)


LIES: dict[str, Callable[[int], bytes]] = {
    "a batch below the offset": lambda offset: batch_at(offset - 1) if offset else batch_at(0),
    "descending batches": descending,
    "overlapping batches": lambda _: batch_at(0, [b"a", b"b"]) + batch_at(1),
    "a negative offset": lambda _: batch_at(-5, last_delta=10),
    "an offset beyond all": lambda _: batch_at(2**63 - 1),
    "a jump": lambda _: batch_at(0) + batch_at(2**50),
    "a far jump": lambda _: batch_at(2**61),
    "nothing below the end": lambda _: b"",
    "never a whole batch": lambda offset: batch_at(offset)[:-1],
    "garbage": lambda _: random.Random(1).randbytes(1000),
    "another magic": lambda offset: batch_at(offset, magic=1),
    "a wrong checksum": lambda offset: batch_at(offset)[:-1] + b"?",
    "too many records": lambda offset: batch_at(offset, count=2**31 - 1, last_delta=2**31 - 2),
    "a negative number of records": lambda offset: batch_at(offset, count=-1),
    "a negative last delta": lambda offset: batch_at(offset, last_delta=-7),
    "an unknown codec": lambda offset: batch_at(offset, attributes=7),
    "a body that is not compressed": lambda offset: batch_at(offset, attributes=3),
    "descending deltas": lambda _: deltas(3, 2, 9, last=9),
    "equal deltas": lambda _: deltas(1, 1, last=1),
    "a delta above the last one": lambda _: deltas(0, 9, last=5),
    "a time beyond all": lambda offset: batch_at(offset, first_time=2**62),
    "a control batch without a key": lambda offset: batch_at(offset, attributes=32)[:HEAD_BYTES],
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_errors(target: BrokerThread, lie: str) -> None:
    server = HostileKafka()
    server.records = LIES[lie]

    async def run() -> None:
        async with asyncio.timeout(20):
            with pytest.raises((BrokerError, PeerError)) as caught:
                await step(target, server, steps=3)
            assert TOPIC in str(caught.value), caught.value

    asyncio.run(run())


def test_an_end_that_goes_back(target: BrokerThread) -> None:
    server = HostileKafka()

    def answer(offset: int) -> bytes:
        server.end = 1
        return batch_at(offset, [b"x"] * 5)

    server.records = answer
    with pytest.raises(Conflict, match="fewer records than were copied"):
        asyncio.run(step(target, server, steps=3))


def test_a_first_offset_that_jumps(target: BrokerThread) -> None:
    server = HostileKafka()

    def answer(offset: int) -> bytes:
        server.first, server.end = 2**60, 2**60 + 9
        return batch_at(offset)

    server.records = answer
    with pytest.raises(Invalid, match="far apart"):
        asyncio.run(step(target, server, steps=3))


def bomb(codec: Codec) -> bytes:
    if codec is Codec.GZIP:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        zeros = bytes(1 << 20)
        return b"".join([packer.compress(zeros) for _ in range(BOMB_BYTES >> 20)]) + packer.flush()
    half = bytes(15 << 20)
    packed = bytes(cramjam.zstd.compress(half) if codec is Codec.ZSTD else compress(half, codec))
    return packed + packed[16:] * 8 if codec is Codec.SNAPPY else packed * (BOMB_BYTES // len(half))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTD, Codec.LZ4, Codec.SNAPPY])
def test_bombs_do_not_fill_the_memory(target: BrokerThread, codec: Codec) -> None:
    body = bomb(codec)
    server = HostileKafka()
    server.records = lambda offset: with_body(offset, body, codec=codec)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Invalid, match=f"too large.*topic='{TOPIC}'"):
        asyncio.run(step(target, server))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KB_MAX


def test_many_small_bombs_are_read_one_after_the_other(target: BrokerThread) -> None:
    record = bytes(14 << 20)
    size = len(batch_at(0, [record])) - HEAD_BYTES
    assert size > 14 << 20
    body = bytes(cramjam.zstd.compress(batch_at(0, [record])[HEAD_BYTES:]))
    server = HostileKafka()
    server.end = 50
    server.records = lambda offset: b"".join(
        [with_body(number, body, codec=Codec.ZSTD) for number in range(offset, 50)]
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def run() -> None:
        client = await connect(await server.start())
        try:
            pieces, following = await client.fetch_pieces(TOPIC, 0, 0)  # type: ignore[attr-defined]
            assert (len(pieces), following) == (2, 2)
        finally:
            await client.close()
            await server.stop()

    asyncio.run(run())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KB_MAX


@pytest.mark.parametrize("frame", [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", bytes(100), b"\0\0\0\x08" + b"\xff" * 8])
def test_frames_that_are_none(target: BrokerThread, frame: bytes) -> None:
    server = HostileKafka()
    server.frame = frame
    with pytest.raises(Unavailable):
        asyncio.run(step(target, server))


@pytest.mark.parametrize("api", [Api.METADATA, Api.LIST_OFFSETS, Api.FETCH])
def test_a_source_that_does_not_respond(target: BrokerThread, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_module, "READ_S", 0.2)
    server = HostileKafka()
    server.silent = api
    with pytest.raises(Unavailable, match=f"does not respond topic='{TOPIC}'"):
        asyncio.run(step(target, server))


def test_aborted_transactions_that_never_were(target: BrokerThread) -> None:
    server = HostileKafka()
    server.end = 3
    server.aborted = [(number % 7, number) for number in range(10_000)]
    server.records = lambda offset: b"".join([batch_at(number, [b"%d" % number]) for number in range(offset, 3)])
    assert asyncio.run(step(target, server)) == [b"0", b"1", b"2"]


def test_mutated_batches_give_records_or_an_error() -> None:
    """Whatever the batches contain, the records that are stored are valid and ascend."""
    chance = random.Random(5)
    plain = batch_at(10, [b"a", b"bb" * 40, b"", b"d"])
    sources = [plain, batch_at(10, [b"a" * 50] * 9, codec=Codec.LZ4), batch_at(10, [b"a"], attributes=48)]
    accepted = 0
    for _ in range(20_000):
        batch = bytearray(chance.choice(sources))
        for _ in range(chance.choice((1, 1, 2, 5))):
            batch[chance.randrange(len(batch))] = chance.choice((0, 1, 2, 127, 128, 255, chance.randrange(256)))
        if chance.random() < 0.9:
            batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
            batch[16] = 2
        data = sealed(batch) + plain[: chance.randrange(len(plain))]
        offset = chance.choice((0, 10, 11, 12))
        try:
            pieces, following = decode_pieces(data, offset=offset, aborted=[(-1, 0)])
            batches = list(covering(list(merged(pieces)), offset, following))
        except (PeerError, Invalid):
            continue
        assert following >= offset
        for one in batches:
            assert validate(one) == len(one)
        accepted += bool(batches)
    assert accepted > 1_000


def test_other_topics_and_links_continue(target: BrokerThread) -> None:
    server, honest = HostileKafka(), HostileKafka()
    server.records = lambda offset: b"".join([batch_at(number) for number in range(offset, offset + 3)])[:-1]
    server.records = descending
    honest.end = 50
    reports: dict[tuple[str, str], LinkReport] = {}

    async def run() -> None:
        changed = asyncio.Event()

        def note(found: LinkReport) -> None:
            reports[found.link, found.topic] = found
            changed.set()

        writer = await as_link(target)
        followers = []
        for name, one in (("bad", server), ("good", honest)):
            link = LinkDefinition(name, await one.start(), (TOPIC,))
            if name == "bad":
                link = LinkDefinition(name, link.source, ("other",))
            followers.append(Follower(link, writer, note))
        tasks = [asyncio.create_task(follower.run()) for follower in followers]
        async with asyncio.timeout(30):
            while reports.get(("good", TOPIC), LinkReport("")).copied < 50 or ("bad", "other") not in reports:
                changed.clear()
                await changed.wait()
        for follower in followers:
            follower.stop()
        await asyncio.gather(*tasks)
        await writer.close()
        await server.stop()
        await honest.stop()

    asyncio.run(run())
    assert "do not ascend" in reports["bad", "other"].error
    assert reports["good", TOPIC].error == ""


def test_the_deltas_of_a_batch() -> None:
    pieces, following = decode_pieces(deltas(1, 4, 9, last=12), offset=0, aborted=[])
    assert ([piece.first for piece in pieces], following) == ([0], 13)
    assert array("I", bytes(pieces[0].deltas or b"")).tolist() == [1, 4, 9]
