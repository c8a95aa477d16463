"""Data directories of earlier releases are opened by this one, with everything in them.

Each directory here holds ``data.tar.xz``, the data directory of a killed broker (segments, a snapshot, a journal with unsealed records), and
``contents.json``, what the release that wrote it read from it: every record and the whole state, see ``contents``.

* ``state-1``: five protocols with their groups, users, writers, staged batches, an open transaction and ended ones.
* ``state-2``: also Kafka: idempotent producers, offsets with metadata and a leader epoch, topics with Kafka's settings.
* ``state-3``: newer Kafka groups and classic ones, one shared with another protocol. Transactions of several partitions and groups that were
  committed, aborted, and are open in a sealed segment and in the journal. A user with SCRAM verifiers. See ``test_newer``.
* ``state-4``: the same, and settled classic groups in the snapshot and in the journal. See ``test_settled``.
* ``state-5``: the same, and transactions over several shards: open ones, participants of other shards' transactions, and decisions that some
  shards have not followed, in the snapshot and in the journal. See ``test_shared``.
"""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.log.log import FileLog
from polywire.log.settings import LogSettings
from polywire.records.batch import read_header
from polywire.records.columns import BatchFlags, Record
from polywire.records.rows import from_records
from polywire.testing.loop import SimulatedClock
from polywire.types import Level
from tests.broker_process import BrokerProcess
from tests.vectors.data.contents import contents, records_of

HERE: Final = Path(__file__).parent
DIRECTORIES: Final = sorted(path.parent.name for path in HERE.glob("*/contents.json"))
LOGIN: Final = "alice:secret-of-alice"
STAGED: Final = bytes(range(1, 17))
PRODUCED: Final = [Record(b"exactly once %d" % number) for number in range(3)]
KAFKA_PRODUCER: Final = b"k\0\0\0\1\0\0\0\1"
PRODUCED_TO: Final = ("flux-topic", "kafka07-topic", "cursus-topic", "iggy-stream.iggy-topic", "journal-only")
LOG: Final = LogSettings(slot_bytes=128 * 1024, sync_interval_ms=2, disk_reserve_bytes=0)


class Kept:
    """A data directory, unpacked, and its content when it was written."""

    def __init__(self, name: str, path: Path) -> None:
        self.path = path
        self.expected: dict[str, Any] = json.loads((HERE / name / "contents.json").read_text())
        self.written_at_us: int = self.expected.pop("written_at_us")
        with tarfile.open(HERE / name / "data.tar.xz") as archive:
            archive.extractall(path, filter="data")

    def open(self) -> Broker:
        """Open this release's broker over it, at the time when it was written, so that nothing has expired."""
        clock = SimulatedClock(self.written_at_us)
        loop = asyncio.get_running_loop()
        return Broker.open(self.path, BrokerSettings(), loop, clock, log_settings=LOG)


@pytest.fixture(params=DIRECTORIES)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return Kept(request.param, tmp_path / "data")


class Answer(asyncio.Future[Any]):
    """The result of a method, to be awaited."""

    def notify(self, result: object) -> None:
        """Set the result."""
        if isinstance(result, BrokerError):
            self.set_exception(result)
        else:
            self.set_result(result)


def _differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Return the differences. New fields are allowed."""
    if isinstance(found, dict) and isinstance(expected, dict):
        gone = [f"{where}.{name} is gone" for name in expected.keys() - found.keys()]
        both = expected.keys() & found.keys()
        return gone + [
            text for name in sorted(both) for text in _differences(found[name], expected[name], f"{where}.{name}")
        ]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [text for index, pair in pairs for text in _differences(*pair, f"{where}[{index}]")]
    return [] if found == expected else [f"{where}: {found!r} was {expected!r}"]


def test_a_difference_is_detected() -> None:
    was = {"records": [{"value": "a"}, {"value": "b"}]}
    assert _differences({"records": [{"value": "a", "later": 1}, {"value": "b"}], "more": []}, was) == []
    assert _differences({"records": [{"value": "a"}, {"value": "c"}]}, was) == [".records[1].value: 'c' was 'b'"]
    assert _differences({"records": [{"value": "a"}, {}]}, was) == [".records[1].value is gone"]
    assert len(_differences({"records": [{"value": "a"}]}, was)) == 1


def test_there_is_a_directory_of_every_shape_of_the_state() -> None:
    assert DIRECTORIES == ["state-1", "state-2", "state-3", "state-4", "state-5"]
    for name in DIRECTORIES:
        assert (HERE / name / "data.tar.xz").stat().st_size < 64 * 1024


def test_everything_that_was_written_is_read(kept: Kept) -> None:
    asyncio.run(_everything_that_was_written_is_read(kept))


async def _everything_that_was_written_is_read(kept: Kept) -> None:
    broker = kept.open()
    assert isinstance(broker._log, FileLog)
    found = await contents(broker, broker._log._state.staging)
    broker.close()
    assert found["records"].keys() == kept.expected["records"].keys()
    assert _differences(found, kept.expected) == []


def test_a_log_of_each_kind_is_there(kept: Kept) -> None:
    asyncio.run(_a_log_of_each_kind_is_there(kept))


async def _a_log_of_each_kind_is_there(kept: Kept) -> None:
    for part in ("journal/*.pwj", "segments/*", "snapshots/*"):
        assert list(kept.path.glob(part)), part
    broker = kept.open()
    flags = {}
    for name in ("compacted", "polywire-topic", "lz4-topic"):
        partition = broker.topic(name).partitions[-2 if name == "polywire-topic" else 0]
        answer = Answer()
        found = broker.fetch(partition, 0, bytes_max=1, then=answer.notify)
        read = found if isinstance(found, Read) else await answer
        flags[name] = BatchFlags(read_header(read.chunks[0]).flags) & ~BatchFlags.WIDE
    broker.close()
    assert flags == {"compacted": BatchFlags.COMPACTED, "polywire-topic": BatchFlags.ZSTD, "lz4-topic": BatchFlags.LZ4}


def test_open_work_of_earlier_releases_continues(kept: Kept) -> None:
    asyncio.run(_what_was_begun_goes_on(kept))


async def _what_was_begun_goes_on(kept: Kept) -> None:
    broker = kept.open()
    partition = broker.topic("polywire-topic").partitions[0]
    next_offset = partition.log.next_offset

    repeated = from_records(PRODUCED, producer_id=b"producer", producer_epoch=2, base_sequence=10)
    answer = Answer()
    broker.produce(partition, repeated, level=Level.WRITTEN, done=answer.notify)
    broker.commit()
    assert await answer == next_offset - len(PRODUCED)

    for number, tokens in ((3, []), (4, [STAGED])):
        answer = Answer()
        broker.publish("writer", number, tokens, done=answer.notify)
        broker.commit()
        assert (await answer).duplicate == (number == 3)
    read = await records_of(broker, partition)
    assert [record.value for record in read[next_offset:]] == [b"staged 0", b"staged 1"]

    answer = Answer()
    broker.access.log_in("alice", "secret-of-alice", answer.notify)
    assert (await answer).name == "alice"
    broker.close()


def test_state_of_kafka_clients_continues(tmp_path: Path) -> None:
    asyncio.run(_what_kafka_clients_had_goes_on(Kept("state-2", tmp_path / "data")))


async def _what_kafka_clients_had_goes_on(kept: Kept) -> None:
    broker = kept.open()
    held = broker.classic.positions("kafka-group", "kafka-topic")[0]
    assert (held.offset, held.epoch, held.metadata.rstrip("\0")) == (7, 1, "text beside the offset")

    partition = broker.topic("kafka-topic").partitions[0]
    last = kept.expected["records"]["kafka-topic"][0]["records"][-1]
    record, sequence = Record(None, key=b"key 0"), last["sequence"]
    repeated = from_records([record], producer_id=KAFKA_PRODUCER, producer_epoch=0, base_sequence=sequence)
    answer = Answer()
    broker.produce(partition, repeated, level=Level.WRITTEN, done=answer.notify)
    broker.commit()
    assert await answer == last["offset"]
    assert partition.log.next_offset == last["offset"] + 1
    broker.close()


def test_the_process_serves_it_accepts_more_and_starts_again(kept: Kept) -> None:
    asyncio.run(_the_process_serves_it_takes_more_and_starts_again(kept))


async def _the_process_serves_it_takes_more_and_starts_again(kept: Kept) -> None:
    expected = kept.expected["records"]
    process = BrokerProcess(kept.path, "--offsets-retention-hours", "0", wires=("polywire",))
    with process:
        async with await _connected(process) as client:
            for topic in PRODUCED_TO:
                await client.produce(topic, [Record(b"of this release", key=b"k")], partition=1)
        assert process.stop() == 0
        process.start()
        async with await _connected(process) as client:
            for topic, partitions in expected.items():
                await _check(client, topic, partitions)
        assert process.stop() == 0


async def _check(client: PolywireClient, topic: str, partitions: list[dict[str, Any]]) -> None:
    """Assert that a topic's records are at their offsets, followed by at most what this test added."""
    for number, was in enumerate(partitions):
        records = await client.fetch(topic, number, was["first_offset"])
        count = len(was["records"])
        assert [record.offset for record in records[:count]] == [record["offset"] for record in was["records"]]
        added = number == 1 and topic in PRODUCED_TO
        assert [record.value for record in records[count:]] == [b"of this release"] * added, topic


async def _connected(process: BrokerProcess) -> PolywireClient:
    client = await connect(process.url("polywire").replace("://", f"://{LOGIN}@"))
    assert isinstance(client, PolywireClient)
    return client
