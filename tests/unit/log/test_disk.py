"""Deleting segments blocks neither the log nor readers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from polywire.clock import SYSTEM_CLOCK, SystemClock
from polywire.log.disk import PAUSE_SECONDS_MIN, READ_MAX, Deleter
from polywire.log.worker import ThreadWorker
from polywire.store import file as file_store
from polywire.store.base import BlobMissing
from polywire.store.file import FileStore
from polywire.testing.loop import Handle, ManualLoop
from tests.memory_store import MemoryStore
from tests.unit.log.rig import Rig, RigLoop
from tests.unit.log.test_file_log import fill_slot


class Held:
    """A disk that blocks in the deletion of a segment until it is released."""

    def __init__(self) -> None:
        self.begun, self.let_go = Event(), Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found, unlink = Held(), Path.unlink

    def wait(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".pws" and not path.name.startswith("."):
            found.begun.set()
            found.let_go.wait(20)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", wait)
    yield found
    found.let_go.set()


def segments(directory: Path) -> int:
    return len(list((directory / "segments").glob("[!.]*")))


def test_sealing_and_syncs_continue_while_segments_are_deleted(tmp_path: Path, held: Held) -> None:
    rig = Rig(tmp_path)
    gone, kept = rig.log.open_partition(1), rig.log.open_partition(2)
    fill_slot(rig, gone)
    rig.settle()
    rig.log.drop_partition(1)
    rig.log.commit()
    rig.log._sealer.remove()
    rig.loop.run_until(held.begun.is_set)
    for _ in range(8):  # more than there are slots, so that all are sealed and reused
        fill_slot(rig, kept)
        rig.settle()
    rig.log.change(b"x", level=2, done=None)  # type: ignore[arg-type]
    rig.settle()
    before = segments(tmp_path)
    held.let_go.set()
    rig.loop.run_until(lambda: segments(tmp_path) == before - 1)
    rig.log.close()


def test_a_start_does_not_wait_for_segments_left_to_be_deleted(tmp_path: Path, held: Held) -> None:
    rig = Rig(tmp_path)
    rig.kill()
    for number in range(3):
        (tmp_path / "segments").mkdir(exist_ok=True)
        (tmp_path / "segments" / f"00000001-{number:08x}.pws").write_bytes(b"unreferenced")
    rig.open()
    assert segments(tmp_path) == 3
    held.let_go.set()
    rig.loop.run_until(lambda: segments(tmp_path) == 0)
    rig.log.close()


def test_names_that_a_start_will_reuse_are_free_by_then(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"kept"])
    rig.log.commit()
    rig.kill()
    # left by a start that got no further
    for name in ("segments/00000002-00000001.pws", "snapshots/00000002-00000000.pwt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half of a start")
    rig.open()
    rig.loop.run_until(lambda: not rig.log._disk.deleter._running)
    assert rig.read(rig.log.partition(1)) == [b"kept"]
    rig.log.close()


def test_files_are_truncated_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "FREED_BYTES", 1000)
    store = FileStore(tmp_path)
    store.put_new("a", [bytes(3500)])
    assert list(store.delete_in_steps("a")) == [1000, 1000, 1000, 500]
    assert list(store.delete_in_steps("a")) == []
    assert store.list("") == []


def test_an_open_deleted_file_stays_readable(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_new("a", [b"x" * 100_000])
    blob, out = store.open("a"), bytearray(100_000)
    steps = store.delete_in_steps("a")
    assert [next(steps), next(steps)] == [0, 0]
    with pytest.raises(BlobMissing):
        store.open("a")
    assert blob.pread_into(out, 0) == 100_000
    assert out == b"x" * 100_000
    del blob
    assert list(steps) == [100_000]


def test_a_file_open_in_another_process_is_not_truncated(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_new("a", [b"x"])
    with (tmp_path / "a").open("rb") as reader:
        steps = store.delete_in_steps("a")
        assert next(steps) == 0
        assert reader.read() == b"x"
    assert list(steps) == [1]


def test_readers_keep_few_files_open(tmp_path: Path) -> None:
    store, loop = FileStore(tmp_path), RigLoop()
    names = [f"blob-{number}" for number in range(READ_MAX + 8)]
    for name in names:
        store.put_new(name, [b"x"])
    readers = [(tmp_path / name).open("rb") for name in names]
    before = len(os.listdir("/proc/self/fd"))
    deleter = Deleter(store, loop, SYSTEM_CLOCK, ThreadWorker)
    deleter.delete(names)
    loop.run_until(lambda: store.list("") == [] and deleter.waiting <= READ_MAX)
    assert len(os.listdir("/proc/self/fd")) <= before + READ_MAX + 2
    for reader in readers:
        reader.close()
    loop.run_until(lambda: deleter.waiting == 0 and not deleter._running)
    deleter.stop()
    assert len(os.listdir("/proc/self/fd")) <= before - len(readers)


def test_the_deleter_pauses_after_each_piece_for_as_long_as_it_took() -> None:
    took_s, now_s, pauses = [0.25, 0.0, 0.03], [0.0], list[float]()

    class Slow(MemoryStore):
        def delete_in_steps(self, name: str) -> Iterator[int]:
            for seconds in took_s:
                now_s[0] += seconds
                yield 1

    class Clock(SystemClock):
        def monotonic(self) -> float:
            return now_s[0]

    class Loop(RigLoop):
        def call_later(self, delay: float, callback: Callable[..., object], *args: object) -> Handle:
            pauses.append(delay)
            return self.call_soon(callback, *args)

    loop = Loop()
    deleter = Deleter(Slow(), loop, Clock(), ThreadWorker)
    deleter.delete(["a"])
    loop.run_until(lambda: not deleter._running)
    deleter.stop()
    assert [pause >= max(seconds, PAUSE_SECONDS_MIN) for pause, seconds in zip(pauses, took_s, strict=True)] == 3 * [
        True
    ]


def test_urgent_deletions_go_first_and_a_stop_leaves_the_rest() -> None:
    store, loop, order, let_go = MemoryStore(), RigLoop(), list[str](), Event()

    class Slow(MemoryStore):
        def delete_in_steps(self, name: str) -> Iterator[int]:
            order.append(name)
            let_go.wait(20)
            yield 1

    store = Slow()
    deleter = Deleter(store, loop, SYSTEM_CLOCK, ThreadWorker)
    deleter.delete(["a", "b", "c"])
    loop.run_until(lambda: order == ["a"])
    deleter.delete(["urgent"], urgent=True)
    let_go.set()
    loop.run_until(lambda: not deleter._running)
    assert order == ["a", "urgent", "b", "c"]
    let_go.clear()
    deleter.delete(["d", "e"])
    loop.run_until(lambda: order[-1] == "d")
    stopped = Thread(target=deleter.stop)
    stopped.start()
    let_go.set()
    stopped.join()
    loop.run_pass()
    assert order[-1] == "d"


def test_a_file_with_another_hard_link_is_not_truncated(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_new("a", [b"x" * 1000])
    (tmp_path / "kept").hardlink_to(tmp_path / "a")
    assert list(store.delete_in_steps("a")) == []
    assert store.list("") == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"x" * 1000


class AtOnce:
    """Implements ``Worker``."""

    def run(self, job: Callable[[], object], completed: Callable[[Any], object]) -> None:
        completed(job())

    def stop(self) -> None:
        """Do nothing: no thread runs."""


def test_during_the_grace_period_only_urgent_names_are_deleted() -> None:
    store, loop = MemoryStore(), ManualLoop()
    for name in ("old", "replaced", "later"):
        store.put_new(name, [b"x"])
    deleter = Deleter(store, loop, loop.clock, lambda _, __: AtOnce(), grace_s=900.0)
    deleter.delete(["old"])
    deleter.delete(["replaced"], urgent=True)
    loop.advance(600.0)
    deleter.delete(["later"])
    loop.advance(299.0)
    assert store.list("") == ["later", "old"]
    loop.advance(2.0)
    assert store.list("") == ["later"]
    deleter.stop()
    loop.advance(900.0)
    assert store.list("") == ["later"], "a closed log deletes nothing"
