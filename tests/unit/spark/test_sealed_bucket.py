"""Direct reads of sealed records from the broker's bucket return the same records without a broker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import BulkConnection
from polywire.clock import Clock
from polywire.cluster import uploader
from polywire.cluster.opening import ShardConfig, open_shard
from polywire.errors import ErrorCode, Unavailable
from polywire.log.base import Log, Replay
from polywire.protocols.polywire import messages
from polywire.spark import sealed as planning
from polywire.spark.options import SourceOptions, read_options
from polywire.spark.sealed import locate_ranges
from polywire.store.data_directory import BlobRoot
from polywire.store.file_objects import FileObjects
from polywire.store.identity import NAME, find_identity, make_identity
from polywire.store.objects import FIRST, shard_root
from polywire.tables import sealed
from polywire.tables.sealed import ReadRange, SealedAccess, Tally, read_range
from polywire.types import Level
from tests.unit.client.served import Served
from tests.unit.tables.test_sealed import SCHEMA, SLOTS, TOPIC, Files, Rows

SHARD = shard_root(FIRST)


@pytest.fixture(autouse=True)
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (sealed, "RUN_BYTES_MIN", 1),
        (sealed, "RANGE_RECORDS_MIN", 1),
        (sealed, "PIECE_BYTES", 40_000),
        (planning, "PACK_RECORDS", 1),
        (sealed, "CHUNK_BYTES", 33_000),
        (sealed, "PAUSE_FIRST_S", 0.001),
        (uploader, "PUT_INTERVAL_S", 0.001),
    ):
        monkeypatch.setattr(module, name, value)
    sealed._inaccessible.clear()
    planning._without_bucket.clear()
    sealed._sources.clear()


class ServedBucket(Served):
    """A broker whose log is in a directory that serves as a bucket."""

    def _opened(self, data_dir: Path, loop: asyncio.AbstractEventLoop, clock: Clock) -> Broker:
        root = data_dir / "bucket"
        root.mkdir(parents=True)
        objects = FileObjects(root)
        identity, _ = make_identity(objects, os.urandom, 1)
        bucket = BlobRoot(f"file://{root}", identity.mark, SHARD)
        place = ShardConfig(objects, objects, data_dir / "cache", "one", 1 << 24, bucket)
        own = replace(SLOTS, durability=Level.STORED)

        def recover(replay: Replay) -> Log:
            return open_shard(place, settings=own, loop=loop, clock=clock, replay=replay)

        return Broker.over(recover, settings=BrokerSettings(durability=Level.STORED), loop=loop, clock=clock)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    with ServedBucket(data_dir=tmp_path) as served:
        made = Files(served, tmp_path / "bucket" / SHARD)
        made.make()
        made.fill(900_000)
        deadline = monotonic() + 60
        while len(made.runs()) < 3:  # its group is being written
            assert monotonic() < deadline, "nothing was sealed"
            sleep(0.01)
        yield made
        made.connection.close()


def options(files: Files, **given: str) -> SourceOptions:
    return read_options({"address": f"127.0.0.1:{files.served.port}", "subscribe": TOPIC, **given}, streaming=False)


def planned(files: Files, wanted: ReadRange, **given: str) -> ReadRange:
    ((found,),) = locate_ranges(options(files, **given), [(wanted,)])
    return found


def no_broker() -> NoReturn:
    pytest.fail("the broker was asked")


def read(
    wanted: ReadRange, connect: Callable[[], BulkConnection] = no_broker, *, required: bool = False
) -> tuple[Rows, Tally]:
    rows: Rows = []
    tally = Tally()
    access = SealedAccess(required=required)
    for chunk in read_range(connect, wanted, tally, bodies=True, check_epoch=True, access=access):
        for batch in chunk_to_arrow(chunk, SCHEMA.names, SCHEMA):
            rows += batch.to_pylist()
    return rows, tally


def sealed_part(files: Files) -> ReadRange:
    runs = files.runs()
    assert len(runs) >= 3
    return replace(files.everything(), offset_end=runs[-1].next_offset)


def test_sealed_records_are_read_without_a_broker(files: Files) -> None:
    wanted = sealed_part(files)
    rows = files.read(wanted, files=False)[0]
    for required in (False, True):
        found, tally = read(planned(files, wanted), required=required)
        assert found == rows
        assert (tally.file_bytes, tally.wire_bytes) == (0, 0)
        assert tally.bucket_bytes > 100_000


def test_every_range_is_the_same_from_bucket_and_broker(files: Files) -> None:
    everything = files.everything()
    for _ in range(15):
        first, last = sorted(files.chance.sample(range(everything.offset_end + 1), 2))
        wanted = replace(everything, offset=first, offset_end=last)
        assert read(planned(files, wanted), lambda: files.connection)[0] == files.read(wanted, files=False)[0]


def test_a_restarted_broker_reports_the_same_bucket(files: Files) -> None:
    reported = files.connection.locate(TOPIC, 0)
    identity = find_identity(FileObjects(files.directory.parents[1]))
    assert identity is not None
    assert reported.mark == identity.mark
    assert all(run.blob.startswith(f"{SHARD}segments/") for run in reported.runs)


def test_small_ranges_are_not_located(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sealed_part(files)
    monkeypatch.setattr(planning, "PACK_RECORDS", wanted.record_count + 1)
    assert planned(files, wanted).sealed is None
    assert planned(files, wanted, localSegments="required").sealed is not None
    assert planned(files, wanted, localSegments="off").sealed is None


def another_bucket(files: Files, wanted: ReadRange) -> ReadRange:
    objects = FileObjects(files.directory.parents[1])
    objects.delete(NAME)
    make_identity(objects, os.urandom, 2)
    return wanted


def not_visible(files: Files, wanted: ReadRange) -> ReadRange:
    assert wanted.sealed is not None
    elsewhere = replace(wanted.sealed.root, address="file:///nowhere/at/all")
    return replace(wanted, sealed=replace(wanted.sealed, root=elsewhere))


def no_bucket(files: Files, wanted: ReadRange) -> ReadRange:
    assert wanted.sealed is not None
    return replace(wanted, sealed=replace(wanted.sealed, root=replace(wanted.sealed.root, address="ftp://x/y")))


def deleted(files: Files, wanted: ReadRange) -> ReadRange:
    for path in segments(files):
        path.unlink()
    return wanted


def damaged(files: Files, wanted: ReadRange) -> ReadRange:
    for path in segments(files):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(content)
    return wanted


def cut(files: Files, wanted: ReadRange) -> ReadRange:
    for path in segments(files):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    return wanted


def segments(files: Files) -> list[Path]:
    found = [path for path in (files.directory / "segments").iterdir() if not path.name.startswith(".")]
    assert found
    return found


@pytest.mark.parametrize("harm", [another_bucket, not_visible, no_bucket, deleted, damaged, cut])
def test_unreadable_segments_are_read_from_the_broker_or_refused(
    files: Files, harm: Callable[[Files, ReadRange], ReadRange]
) -> None:
    wanted = sealed_part(files)
    rows = files.read(wanted, files=False)[0]
    harmed = harm(files, planned(files, wanted))
    with pytest.raises(Unavailable, match="localSegments=required"):
        read(harmed, required=True)
    if harm not in (deleted, cut, damaged):  # the broker has recently written records cached
        assert read(harmed, lambda: files.connection)[0] == rows
        return
    found, tally = read(harmed, lambda: files.connection)
    assert found == rows
    assert tally.wire_bytes > 0


def test_a_failed_bucket_request_is_retried(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = planned(files, sealed_part(files))
    asked = 0
    plain = FileObjects.read_range

    def failing(objects: FileObjects, name: str, start: int, stop: int) -> bytes:
        nonlocal asked
        asked += 1
        if asked % 3 == 0:
            raise Unavailable(ErrorCode.STORAGE_FAILED, "the network is away")
        return plain(objects, name, start, stop)

    monkeypatch.setattr(FileObjects, "read_range", failing)
    assert read(wanted, required=True)[1].bucket_bytes > 0
    assert asked > 3


def test_a_broker_without_a_bucket_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(data_dir=tmp_path, log_settings=SLOTS) as served:
        made = Files(served, tmp_path)
        made.make()
        made.fill(300_000)
        asked = 0
        plain = BulkConnection.locate

        def counted(*arguments: Any, **named: Any) -> messages.Located:
            nonlocal asked
            asked += 1
            return plain(*arguments, **named)

        monkeypatch.setattr(BulkConnection, "locate", counted)
        wanted = made.everything()
        pieces = locate_ranges(options(made), [(wanted, wanted), (wanted,)])
        assert all(one.sealed is None for piece in pieces for one in piece)
        assert asked == 1
        made.connection.close()


# The process that writes tables


@pytest.mark.parametrize("is_own", [True, False])
def test_the_writer_of_tables_reads_the_bucket(files: Files, monkeypatch: pytest.MonkeyPatch, is_own: bool) -> None:
    monkeypatch.setattr(sealed, "READER_RECORDS_MIN", 1)
    monkeypatch.setattr(sealed, "READER_RUN_BYTES_MIN", 1)
    if not is_own:
        monkeypatch.setattr(sealed, "find_identity", lambda _: None)
    wanted, reader = files.everything(), sealed.SegmentReader(files.connection)
    chunks = reader.fetch_range(TOPIC, 0, wanted.incarnation, wanted.offset, wanted.offset_end, epoch=wanted.epoch)
    found = [
        row for chunk in chunks for batch in chunk_to_arrow(chunk, SCHEMA.names, SCHEMA) for row in batch.to_pylist()
    ]
    assert found == files.read(wanted, files=False)[0]
    assert (reader.tally.bucket_bytes > 100_000) == is_own
    assert (files.connection in sealed._inaccessible) != is_own  # so that the broker is not asked again
