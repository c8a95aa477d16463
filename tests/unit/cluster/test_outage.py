"""A bucket outage: no damage is reported, the loop never waits for the bucket, and the leader steps down."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from polywire.cluster import bucket_store, uploader
from polywire.cluster.opening import CACHE
from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.log.segments import sealer
from polywire.store.objects import Stored
from polywire.testing.memory_objects import MemoryObjects
from polywire.types import Buffer, Level
from tests.unit.cluster.test_shard_log import BucketRig
from tests.unit.log.rig import batch_of, expecting

TOKEN = bytes(15) + b"\1"
BODIES = [b"%d" % number + bytes(3000) for number in range(12)]


class WatchedObjects(MemoryObjects):
    """A bucket that records the thread of each request, and can be unreachable."""

    def __init__(self) -> None:
        super().__init__()
        self.loop_may_ask = True
        self.is_out = False
        self.refused = 0

    def _look(self) -> None:
        if not self.loop_may_ask:
            assert threading.current_thread() is not threading.main_thread(), "the loop waits for the bucket"
        if self.is_out:
            self.refused += 1
            raise Unavailable(ErrorCode.STORAGE_FAILED, "the bucket is out")

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        self._look()
        super().create(name, parts)

    def read(self, name: str) -> Stored:
        self._look()
        return super().read(name)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        self._look()
        return super().read_range(name, start, stop)

    def size(self, name: str) -> int:
        self._look()
        return super().size(name)

    def list(self, prefix: str) -> list[str]:
        self._look()
        return super().list(prefix)

    @contextmanager
    def out(self) -> Iterator[None]:
        """Make the bucket unreachable."""
        self.is_out = True
        try:
            yield
        finally:
            self.is_out = False


def staged_and_taken_over(objects: MemoryObjects, tmp_path: Path) -> BucketRig:
    """Return a leader that finds staged batches in its predecessor's segments."""
    rig = BucketRig(objects, tmp_path)
    partition, reported = rig.log.open_partition(1), list[int]()
    for body in BODIES:
        rig.log.stage(
            TOKEN, partition, batch_of([body]), expires_at_us=2**60, level=Level.STORED, done=expecting(reported)
        )
    rig.loop.run_until(lambda: len(reported) == len(BODIES))
    for _ in range(2):  # recovered batches are sealed, so the next leader finds them in a segment
        rig.settle()
        rig.kill()
        rig.open()
    rig.settle()
    return rig


def publish(rig: BucketRig) -> None:
    published: list[object] = []
    rig.log.publish([TOKEN], b"published", level=Level.STORED, done=published.append)
    rig.loop.run_until(lambda: published)
    assert not isinstance(published[0], BrokerError)


def test_the_loop_sends_the_bucket_no_request(tmp_path: Path) -> None:
    """Bodies that an earlier leader sealed are published, read and sealed again."""
    objects = WatchedObjects()
    rig = staged_and_taken_over(objects, tmp_path)
    objects.loop_may_ask = False
    publish(rig)
    partition = rig.log.partition(1)
    assert rig.read(partition, bytes_max=7000) == BODIES
    for _ in range(8):
        reported = rig.append(partition, [bytes(20_000)])
        rig.settle()  # a slow machine seals later than eight appends fill the journal
        assert reported
    assert rig.read(partition)[: len(BODIES)] == BODIES
    objects.loop_may_ask = True
    rig.log.close()


def test_a_long_outage_is_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a body was unavailable while its slot should have been sealed."""
    monkeypatch.setattr(sealer, "UNREAD_MAX", 2)
    monkeypatch.setattr(sealer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(bucket_store, "PAUSE_FIRST_S", 0.001)
    objects = WatchedObjects()
    rig = staged_and_taken_over(objects, tmp_path)
    publish(rig)
    partition = rig.log.partition(1)
    reported = [rig.append(partition, [bytes(20_000)])]
    rig.loop.run_until(lambda: all(reported))
    with objects.out():
        reported = [rig.append(partition, [bytes(20_000)]) for _ in range(4)]
        rig.log.commit()
        rig.loop.run_until(lambda: rig.log._sealer._unread > 4)
    rig.loop.run_until(lambda: all(reported))
    rig.settle()
    assert rig.read(partition)[: len(BODIES)] == BODIES
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1))[: len(BODIES)] == BODIES
    rig.log.close()


@pytest.mark.parametrize("harm", ["cut short", "removed"])
def test_a_damaged_cache_file_is_fetched_again(tmp_path: Path, harm: str) -> None:
    rig = BucketRig(MemoryObjects(), tmp_path)
    partition = rig.log.open_partition(1)
    wanted, reported = [b"%d" % number + bytes(9000) for number in range(20)], []
    for value in wanted:
        reported.append(rig.append(partition, [value]))
        rig.loop.run_until(lambda: all(reported))
    rig.settle()
    files = [path for path in tmp_path.glob(f"*/{CACHE}/segments/*") if path.is_file()]
    assert files
    for path in files:
        if harm == "removed":
            path.unlink()
        else:
            os.truncate(path, 100)
    assert rig.read(partition) == wanted
    rig.log.close()


def test_a_leader_that_cannot_write_steps_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "STEP_DOWN_S", 0.3)
    objects = WatchedObjects()
    rig = BucketRig(objects, tmp_path)
    partition = rig.log.open_partition(1)
    rig.settle()
    failures: list[BrokerError] = []
    answers: list[int | BrokerError] = []
    rig.log.on_failure(failures.append)
    with objects.out():
        rig.log.append(partition, batch_of([b"unanswered"]), level=Level.WRITTEN, done=answers.append)
        rig.loop.run_until(lambda: failures and answers)
    assert [error.code for error in failures] == [ErrorCode.REPLICATION_TIMEOUT]
    assert [answer.code for answer in answers if isinstance(answer, BrokerError)] == [ErrorCode.REPLICATION_TIMEOUT]
    rig.kill()
    rig.open()
    rig.log.close()


@pytest.mark.parametrize("why", ["another leads", "the bucket is out"])
def test_appends_pending_at_the_end_are_refused_as_not_stored_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The error must not be STORAGE_FAILED, which clients do not retry."""
    monkeypatch.setattr(uploader, "FINISH_S", 0.2)
    objects = WatchedObjects()
    rig = BucketRig(objects, tmp_path)
    rig.settle()
    partition = rig.log.open_partition(1)
    answers: list[int | BrokerError] = []
    rig.log.append(partition, batch_of([b"late"]), level=Level.WRITTEN, done=answers.append)
    if why == "another leads":
        BucketRig(objects, tmp_path, "other").log.close()
        rig.log.close()
    else:
        with objects.out():
            rig.log.close()
    wanted = ErrorCode.NOT_OWNER if why == "another leads" else ErrorCode.REPLICATION_TIMEOUT
    assert [answer.code for answer in answers if isinstance(answer, BrokerError)] == [wanted]
