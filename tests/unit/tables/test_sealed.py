"""Direct reads of sealed files return the same records as the broker, whatever happens to the files meanwhile."""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import BulkConnection
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing
from polywire.log.log import FileLog
from polywire.log.segments import compaction
from polywire.log.settings import LogSettings
from polywire.protocols.polywire import messages
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records
from polywire.spark.options import Headers
from polywire.spark.schema import arrow_schema, source_schema
from polywire.store.data_directory import MARK_FILE
from polywire.store.file import FileBlob
from polywire.tables import sealed
from polywire.tables.sealed import ReadRange, SealedAccess, Tally, read_range
from tests.unit.client.served import Served

SLOTS = LogSettings(slot_bytes=256 * 1024, slot_count_max=4, sync_interval_ms=2, disk_reserve_bytes=0)
SCHEMA = arrow_schema(source_schema(Headers.TYPED))
TOPIC = "t"
Rows = list[dict[str, object]]


@pytest.fixture(autouse=True)
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "RUN_BYTES_MIN", 1)
    monkeypatch.setattr(sealed, "RANGE_RECORDS_MIN", 1)
    monkeypatch.setattr(sealed, "PIECE_BYTES", 40_000)  # pieces cut through batches, and some batches are larger
    monkeypatch.setattr(compaction, "DIRTY_BYTES_MIN", 1)
    sealed._inaccessible.clear()


class Files:
    """A broker over files, and one topic of two partitions in it."""

    def __init__(self, served: Served, directory: Path) -> None:
        self.served = served
        self.directory = directory
        self.connection = BulkConnection("127.0.0.1", served.port, timeout_s=10.0, reconnect_s=2.0)
        self.chance = random.Random(9)

    @property
    def log(self) -> FileLog:
        log = self.served.broker._log
        assert isinstance(log, FileLog)
        return log

    def make(self, **settings: int | str | None) -> None:
        self.connection.create_topic(TOPIC, 2, dict(settings))

    def incarnation(self, partition: int = 0) -> int:
        return self.connection.describe(TOPIC).incarnations[partition]

    def batch(self, count: int, size: int = 300) -> bytearray:
        chance = self.chance
        keys = [None if chance.random() < 0.1 else b"key-%d" % chance.randrange(200) for _ in range(count)]
        headers = (Header(b"n", b"%d" % count),) if chance.random() < 0.3 else ()
        return from_records([Record(chance.randbytes(chance.randrange(size)), key, headers) for key in keys])

    def fill(self, size: int, *, partition: int = 0) -> None:
        """Produce about that many bytes in batches of all sizes; full slots are sealed, and the rest is not."""
        while size > 0:
            made = self.batch(self.chance.choice((1, 20, 100, 500)))
            self.connection.produce(TOPIC, partition, [made])
            self.connection.produce(TOPIC, 1 - partition, [made])
            size -= len(made)
        self.settle()
        for number in range(2):
            self.connection.produce(TOPIC, number, [self.batch(20)])

    def settle(self) -> None:
        self.connection.bounds([TOPIC])
        self.until(lambda: not self.log.sealing)

    def until(self, reached: Callable[[], object]) -> None:
        deadline = monotonic() + 60
        while not self.served.run(reached):
            assert monotonic() < deadline, "nothing was sealed in time"
            sleep(0.01)

    def everything(self, partition: int = 0) -> ReadRange:
        bounds = self.connection.bounds([TOPIC])[partition]
        return ReadRange(TOPIC, partition, bounds.incarnation, bounds.epoch, bounds.first_offset, bounds.next_offset)

    def runs(self, partition: int = 0) -> list[messages.SealedRange]:
        wanted = self.everything(partition)
        return self.connection.locate(TOPIC, partition, wanted.incarnation, wanted.offset, wanted.offset_end).runs

    def read(self, wanted: ReadRange, *, files: bool = True) -> tuple[Rows, Tally]:
        rows: Rows = []
        tally = Tally()
        for chunk in read_range(
            lambda: self.connection, wanted, tally, bodies=True, check_epoch=True, access=SealedAccess(allowed=files)
        ):
            for batch in chunk_to_arrow(chunk, SCHEMA.names, SCHEMA):
                rows += batch.to_pylist()
        return rows, tally

    def check(self, wanted: ReadRange) -> Tally:
        """Assert that both ways give the same rows; return how they were read."""
        rows, tally = self.read(wanted)
        assert rows == self.read(wanted, files=False)[0]
        return tally


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    directory = tmp_path / "data"
    with Served(data_dir=directory, log_settings=SLOTS) as served:
        made = Files(served, directory)
        yield made
        made.connection.close()


def part(wanted: ReadRange, offset: int, offset_end: int) -> ReadRange:
    return ReadRange(wanted.topic, wanted.partition, wanted.incarnation, wanted.epoch, offset, offset_end)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_range_is_the_same_from_files_and_broker(
    files: Files, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No merge, however long it takes: files stay where they are.
    monkeypatch.setattr("polywire.log.log.EXPIRY_SECONDS", 500.0)
    files.make(compression=compression)
    files.fill(1_500_000)
    assert len(files.runs()) >= 4
    for number in range(2):
        wanted = files.everything(number)
        tally = files.check(wanted)
        assert tally.file_bytes > 2 * tally.wire_bytes > 0  # the unsealed end comes from the broker
        for _ in range(10):
            offset, offset_end = sorted(files.chance.sample(range(wanted.offset_end + 1), 2))
            assert (
                files.check(part(wanted, offset, offset_end)).file_bytes > 0
                or offset >= files.runs(number)[-1].next_offset
            )


def test_a_segment_is_read_in_pieces_of_any_size(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.make()
    files.fill(600_000)
    wanted = files.everything()
    rows = files.read(wanted, files=False)[0]
    for size in (1, 7, 111, 1000, 4096, 1 << 20):
        monkeypatch.setattr(sealed, "PIECE_BYTES", size)
        assert files.read(wanted)[0] == rows


def test_short_ranges_headers_and_unsealed_records_are_read_from_the_broker(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.make()
    files.fill(600_000)
    wanted = files.everything()
    monkeypatch.setattr(files.connection.__class__, "locate", lambda *_, **__: pytest.fail("asked"))
    list(read_range(lambda: files.connection, wanted, Tally(), bodies=False, check_epoch=True, access=SealedAccess()))
    monkeypatch.setattr(sealed, "RANGE_RECORDS_MIN", wanted.record_count + 1)
    assert files.check(wanted).file_bytes == 0


def test_small_runs_are_read_from_the_broker_with_their_neighbours(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.make()
    files.fill(900_000)
    runs = files.runs()
    monkeypatch.setattr(sealed, "RUN_BYTES_MIN", sorted(run.stop - run.start for run in runs)[len(runs) // 2])
    tally = files.check(files.everything())
    assert tally.file_bytes > 0
    assert tally.wire_bytes > 0


def test_trimmed_records_are_missing_from_files_and_broker(files: Files) -> None:
    files.make()
    files.fill(900_000)
    wanted, incarnation = files.everything(), files.incarnation()
    middle = files.runs()[1].first_offset + 3
    files.served.run(lambda: files.log.trim(incarnation, middle))
    files.settle()
    with pytest.raises(Missing) as refused:
        files.read(wanted)
    with pytest.raises(Missing) as alike:
        files.read(wanted, files=False)
    assert (refused.value.code, refused.value.message) == (alike.value.code, alike.value.message)
    assert files.everything().offset == middle
    assert files.check(files.everything()).file_bytes > 0


def test_compacted_and_rewritten_segments_are_the_same_from_files_and_broker(files: Files) -> None:
    files.make()
    files.fill(1_500_000)
    before = {run.blob for run in files.runs()}
    sealer, incarnation = files.log._sealer, files.incarnation()

    def tidy() -> bool:
        sealer.tidy(2**61, merging=True)
        return not sealer._to_compact and sealer._compaction is None

    records = len(files.read(files.everything())[0])
    files.served.run(lambda: files.log.compact(incarnation, null_age_us=0))
    files.until(tidy)
    assert before.isdisjoint(run.blob for run in files.runs())
    wanted = files.everything()
    tally = files.check(wanted)
    assert tally.file_bytes > 0
    assert len(files.read(wanted)[0]) < records
    for _ in range(10):
        files.check(part(wanted, *sorted(files.chance.sample(range(wanted.offset_end + 1), 2))))


def test_segments_rewritten_during_reads(files: Files) -> None:
    """Segments are merged, compacted and deleted all the time; each read returns each record once, in order."""
    files.make()
    log, loop, over = files.log, files.served.broker.loop, threading.Event()
    records: dict[int, dict[str, object]] = {}
    file_bytes = 0

    def merge() -> None:
        log._sealer.tidy(2**61, merging=True)
        log.compact(incarnation, null_age_us=2**61)
        if not over.is_set():
            loop.call_later(0.002, merge)

    incarnation = files.incarnation()
    files.served.run(merge)
    for _ in range(3):
        files.fill(600_000)
        records |= {at(row): row for row in files.read(files.everything(), files=False)[0]}
        newest = {row["key"]: offset for offset, row in records.items()}
        needed = {offset for offset, row in records.items() if row["key"] is None or newest[row["key"]] == offset}
        for _ in range(4):
            rows, tally = files.read(files.everything())
            offsets = [at(row) for row in rows]
            assert offsets == sorted(set(offsets))
            assert all(records[at(row)] == row for row in rows)
            assert needed <= set(offsets)
            file_bytes += tally.file_bytes
    over.set()
    assert file_bytes > 0


def at(row: dict[str, object]) -> int:
    offset = row["offset"]
    assert isinstance(offset, int)
    return offset


def test_published_stages_are_the_same_from_files_and_broker(files: Files) -> None:
    files.make()
    files.connection.produce(TOPIC, 0, [files.batch(10)])
    tokens = [bytes([n]) * 16 for n in range(1, 4)]
    for token in (*tokens, b"never-published!"):
        files.connection.stage(token, TOPIC, 0, [files.batch(200), files.batch(300)])
    files.connection.publish("writer", 1, tokens[:2])
    files.fill(600_000)
    files.connection.publish("writer", 2, tokens[2:])  # its bodies are sealed by now, under their token
    assert files.check(files.everything()).file_bytes > 0
    files.fill(600_000)
    assert files.everything().offset_end <= files.runs()[-1].next_offset + 3000
    assert files.check(files.everything()).file_bytes > 0


def test_topics_that_share_a_segment_are_distinguished(files: Files) -> None:
    files.make()
    files.connection.create_topic("other", 1)
    for _ in range(300):
        files.connection.produce(TOPIC, 0, [files.batch(5)])
        files.connection.produce("other", 0, [files.batch(7)])
    files.settle()
    files.fill(300_000)
    assert {run.blob for run in files.runs(0)} & {run.blob for run in files.runs(1)}
    assert files.check(files.everything(0)).file_bytes > 0
    assert files.check(files.everything(1)).file_bytes > 0


# Files that are not as located


def tampered(monkeypatch: pytest.MonkeyPatch, tamper: Callable[[Path], None]) -> list[Path]:
    """Change each file between the broker's response and its first opening."""
    opened: list[Path] = []

    def open_blob(path: Path) -> FileBlob:
        first = path not in opened
        opened.append(path)
        if first:
            tamper(path)
        return FileBlob(path)

    monkeypatch.setattr(sealed, "FileBlob", open_blob)
    return opened


def test_a_segment_deleted_before_it_is_opened(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, sealed.logger.name)
    files.make()
    files.fill(900_000)
    wanted = files.everything()
    rows = files.read(wanted, files=False)[0]  # while the broker holds every file open
    opened = tampered(monkeypatch, lambda path: path.unlink())
    read, tally = files.read(wanted)
    assert read == rows
    assert len(opened) == len(files.runs())
    assert tally.file_bytes == 0
    assert {record.levelname for record in caplog.records if record.name == "polywire.sealed"} == {"INFO"}


def test_a_segment_deleted_while_it_is_read(files: Files) -> None:
    files.make()
    files.fill(900_000)
    wanted = files.everything()
    rows = files.read(wanted, files=False)[0]
    found: Rows = []
    tally = Tally()
    for chunk in read_range(
        lambda: files.connection, wanted, tally, bodies=True, check_epoch=True, access=SealedAccess()
    ):
        for path in (files.directory / "segments").iterdir():
            path.unlink()
        for batch in chunk_to_arrow(chunk, SCHEMA.names, SCHEMA):
            found += batch.to_pylist()
    assert found == rows
    assert 0 < tally.file_bytes < tally.wire_bytes


def flip(where: float) -> Callable[[Path], None]:
    """Damage a file in every tenth of it from ``where`` on."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for at in range(int(len(content) * where), len(content), len(content) // 10):
            content[at] ^= 0x10
        replace_file(path, bytes(content))

    return damage


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file by another; the broker continues with the one it has open."""
    other = path.with_name("replaced")
    other.write_bytes(content)
    other.rename(path)


@pytest.mark.parametrize(
    "tamper",
    [
        flip(0.0),
        flip(0.55),
        lambda path: replace_file(path, path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: replace_file(path, bytes(path.stat().st_size)),
        lambda path: replace_file(path, os.urandom(path.stat().st_size)),
        lambda path: replace_file(path, b""),
    ],
    ids=["damaged", "damaged later", "cut", "zeros", "noise", "empty"],
)
def test_a_file_that_fails_verification(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tamper: Callable[[Path], None]
) -> None:
    files.make()
    files.fill(900_000)
    honest = [(wanted, *files.read(wanted)) for wanted in map(files.everything, range(2))]
    for wanted, rows, _ in honest:
        assert files.read(wanted, files=False)[0] == rows  # while the broker holds every file open
    tampered(monkeypatch, tamper)
    read = [files.read(wanted) for wanted, _, _ in honest]
    assert [rows for rows, _ in read] == [rows for _, rows, _ in honest]
    assert sum(tally.file_bytes for _, tally in read) < sum(tally.file_bytes for _, _, tally in honest)
    assert "WARNING" in {record.levelname for record in caplog.records if record.name == "polywire.sealed"}


def test_an_intact_file_of_other_records(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checksum matches, but the file is another segment's, or another partition's."""
    files.make()
    files.fill(1_500_000)
    wanted = files.everything()
    rows = files.read(wanted, files=False)[0]
    paths = sorted((files.directory / "segments").iterdir())
    contents = [path.read_bytes() for path in paths]
    turned = {path.name: content for path, content in zip(paths, contents[1:] + contents[:1], strict=True)}
    tampered(monkeypatch, lambda path: replace_file(path, turned[path.name]))
    read, tally = files.read(wanted)
    assert read == rows
    assert tally.file_bytes == 0


def test_the_directory_of_another_broker_start(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was right when the broker located the records, and wrong when the file is opened."""
    files.make()
    files.fill(600_000)
    wanted = files.everything()
    mark = files.directory / MARK_FILE
    tampered(monkeypatch, lambda _: replace_file(mark, b"1\n" + b"0" * 32 + b"\n"))
    assert files.read(wanted)[1].file_bytes == 0
    assert files.connection not in sealed._inaccessible


@pytest.mark.parametrize("hide", ["moved", "other mark", "unreadable"])
def test_an_unreachable_directory(files: Files, monkeypatch: pytest.MonkeyPatch, hide: str) -> None:
    files.make()
    files.fill(600_000)
    wanted = files.everything()
    mark, plain = files.directory / MARK_FILE, os.open
    if hide == "moved":
        mark.rename(mark.with_name("elsewhere"))
    elif hide == "other mark":
        shutil.copy(mark, mark.with_name("copy"))
        replace_file(mark, b"1\n" + b"0" * 32 + b"\n")
    else:
        monkeypatch.setattr(os, "open", lambda path, *how, **at: (refused if path == mark else plain)(path, *how, **at))
    opened = tampered(monkeypatch, lambda _: None)
    assert files.check(wanted).file_bytes == 0
    assert opened == []
    monkeypatch.setattr(files.connection.__class__, "locate", lambda *_, **__: pytest.fail("asked again"))
    assert files.check(wanted).file_bytes == 0


def refused(path: object, *_: object, **_at: object) -> int:
    raise PermissionError(13, "Permission denied", str(path))


def test_files_without_read_permission(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.make()
    files.fill(600_000)
    monkeypatch.setattr(sealed, "FileBlob", refused)
    assert files.check(files.everything()).file_bytes == 0


def test_a_failing_disk(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.make()
    files.fill(600_000)
    wanted = files.everything()
    rows = files.read(wanted, files=False)[0]
    preadv = os.preadv

    def broken(descriptor: int, buffers: list[memoryview], position: int) -> int:
        if position > 100_000 and files.directory.name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, position)

    class Failing(FileBlob):
        def pread_into(self, out: memoryview, position: int) -> int:  # type: ignore[override]
            monkeypatch.setattr(os, "preadv", broken)
            try:
                return super().pread_into(out, position)
            finally:
                monkeypatch.setattr(os, "preadv", preadv)

    monkeypatch.setattr(sealed, "FileBlob", Failing)
    read, tally = files.read(wanted)
    assert read == rows
    assert tally.file_bytes > 0


# Brokers with unexpected responses


def test_a_broker_without_the_locate_request(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.make()
    files.fill(300_000)

    def unknown(*_: object, **__: object) -> messages.Located:
        raise Invalid(ErrorCode.INVALID_REQUEST, "unknown verb verb=38")

    monkeypatch.setattr(BulkConnection, "locate", unknown)
    assert files.check(files.everything()).file_bytes == 0
    assert files.connection in sealed._inaccessible


@pytest.mark.parametrize(
    "lie",
    [
        messages.SealedRange("../../../etc/passwd", 0, 100, 0, 10),
        messages.SealedRange("LOCK", 0, 10, 0, 10),
        messages.SealedRange("segments/nothing.pws", 0, 100, 0, 10),
        messages.SealedRange("segments/{}", -1, 100, 0, 10),
        messages.SealedRange("segments/{}", 8, 1 << 40, 0, 10),
        messages.SealedRange("segments/{}", 8, 4000, 0, 10),
        messages.SealedRange("segments/{}", 100, 0, 0, 10),
        messages.SealedRange("segments/{}", 0, 1 << 18, 0, 2**62),
        messages.SealedRange("segments/{}", 0, 1 << 16, 2**62, 2**62 + 1),
        messages.SealedRange("segments/{}", 0, 1 << 16, 5, 0),
    ],
)
def test_a_broker_with_invalid_locations(
    files: Files, monkeypatch: pytest.MonkeyPatch, lie: messages.SealedRange
) -> None:
    files.make()
    files.fill(600_000)
    wanted = part(files.everything(), 3, 77)
    rows = files.read(wanted, files=False)[0]
    honest = files.connection.locate(TOPIC, 0)
    name = Path(honest.runs[0].blob).name
    run = messages.SealedRange(lie.blob.format(name), lie.start, lie.stop, lie.first_offset, lie.next_offset)
    reported = messages.Located(honest.address, honest.mark, [run], more=False)
    monkeypatch.setattr(sealed, "RUN_BYTES_MIN", -(2**62))
    monkeypatch.setattr(BulkConnection, "locate", lambda *_, **__: reported)
    assert files.read(wanted)[0] == rows


def test_reads_that_the_broker_refuses_are_refused_from_files_too(files: Files) -> None:
    files.make()
    files.fill(300_000)
    wanted = files.everything()
    refusals = [
        ReadRange("none", 0, wanted.incarnation, wanted.epoch, 0, 10),
        ReadRange(TOPIC, 9, wanted.incarnation, wanted.epoch, 0, 10),
        ReadRange(TOPIC, 0, wanted.incarnation + 999, wanted.epoch, 0, 10),
        ReadRange(TOPIC, 0, wanted.incarnation, wanted.epoch, wanted.offset_end + 1, wanted.offset_end + 9),
        ReadRange(TOPIC, 0, wanted.incarnation, wanted.epoch, 0, wanted.offset_end + 9),
    ]
    for refusal in refusals:
        reported = []
        for way in (True, False):
            with pytest.raises(BrokerError) as raised:
                files.read(refusal, files=way)
            reported.append((raised.value.code, raised.value.message))
        assert reported[0] == reported[1]


def test_records_lost_with_an_epoch_are_refused(files: Files) -> None:
    files.make()
    files.fill(300_000)
    wanted = files.everything()
    beyond = ReadRange(TOPIC, 0, wanted.incarnation, wanted.epoch, 0, wanted.offset_end + 100)
    with pytest.raises(Conflict) as raised:
        files.read(beyond)
    assert raised.value.code is ErrorCode.EPOCH_ENDED
