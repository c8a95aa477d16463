"""The file store: faults and optimizations that only files have."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from polywire.errors import Busy, ErrorCode, Unavailable
from polywire.log.worker import storage_failed
from polywire.records import allocation
from polywire.records.allocation import LARGE_PAGE_BYTES, allocate_lasting
from polywire.store import system_files
from polywire.store.base import BLOCK_BYTES as PAGE
from polywire.store.base import BlobExists, aligned_buffer
from polywire.store.blob_cache import BlobCache
from polywire.store.file import WRITE_OUT_BYTES, FileStore
from polywire.store.files import Access
from polywire.store.native_memory import address_of
from polywire.store.system_files import SYSTEM_FILES
from polywire.testing.loop import SimulatedClock
from tests.copied_parts import Copied

STRETCH_BYTES = BlobCache(0).stretch_bytes


def descriptors(directory: Path) -> int:
    """Count the open files below a directory; other tests of this process may close theirs at any time."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(directory))
    return found


def test_few_files_stay_open(tmp_path: Path) -> None:
    store = FileStore(tmp_path, open_blobs_max=3)
    for number in range(10):
        store.put_new(f"b{number}", [bytes([number]) * 5000])
    before = descriptors(tmp_path)
    for number in range(10):
        out = bytearray(5000)
        assert store.open(f"b{number}").pread_into(out, 0) == 5000
        assert out == bytes([number]) * 5000
    gc.collect()
    assert descriptors(tmp_path) - before <= 2 * 3
    assert store.open("b9") is store.open("b9")


def test_remains_of_a_crash_are_deleted(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_new("blobs/one", [b"x"])
    (tmp_path / "blobs" / ".two.0123456789ab").write_bytes(b"half")
    assert store.list("blobs/") == ["blobs/one"]
    assert store.delete_remains("blobs") == [".two.0123456789ab"]
    assert store.delete_remains("none") == []
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == ["one"]


@pytest.mark.parametrize("how", ["put", "put_new"])
def test_writeback_starts_before_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    begun: list[tuple[int, int]] = []

    def note(_: int, start: int, size: int, __: int) -> int:
        begun.append((start, size))
        return -1  # an error that the disk reports now is reported by the sync later

    monkeypatch.setattr(system_files, "_sync_file_range", note)
    stretch = WRITE_OUT_BYTES if how == "put" else STRETCH_BYTES
    part, count = bytes(range(256)) * 4096, 2 * stretch // (256 * 4096)
    getattr(FileStore(tmp_path), how)("one", [*[part] * count, b"the rest"])
    assert begun[:2] == [(0, stretch), (stretch, stretch)]
    assert begun[2:] == ([] if how == "put" else [(2 * stretch, len(b"the rest"))])
    assert (tmp_path / "one").read_bytes() == part * count + b"the rest"


def test_systems_without_these_calls_write_all_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_files, "_sync_file_range", None)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    content = bytes(WRITE_OUT_BYTES + 5)
    FileStore(tmp_path).put_new("one", [content])
    assert FileStore(tmp_path).get("one") == content


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: really_write(fd, [parts[0][:4096]], at))
    store = FileStore(tmp_path)
    content = bytes(range(256)) * 100
    store.put_new("one", [content])
    assert store.get("one") == content


@pytest.mark.parametrize(
    ("code", "kind", "error"),
    [
        (errno.ENOSPC, Busy, ErrorCode.DISK_FULL),
        (errno.EDQUOT, Busy, ErrorCode.DISK_FULL),
        (errno.EIO, Unavailable, ErrorCode.STORAGE_FAILED),
    ],
)
@pytest.mark.parametrize("call", ["pwritev", "fsync", "link"])
def test_failures_leave_nothing_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[Exception],
    error: ErrorCode,
    call: str,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    store = FileStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(kind) as caught:
            store.put_new("one", [bytes(10_000)])
    assert getattr(caught.value, "code", None) is error
    assert list(tmp_path.iterdir()) == []
    store.put_new("one", [b"x"])


def test_a_blob_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("one", [b"first"])
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(Busy):
            store.put("one", [b"second"])
    (tmp_path / ".one.new").write_bytes(b"left by a crash")
    assert store.get("one") == b"first"
    store.put("one", [b"third"])
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert store.get("one") == b"third"


def test_a_bad_disk_is_an_error_and_not_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "bad sector")

    store = FileStore(tmp_path)
    store.put_new("one", [bytes(10_000)])
    blob = store.open("one")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(Unavailable):
        blob.read_direct(aligned_buffer(20_480), 0, 10_000)
    with pytest.raises(Unavailable):
        store.get("one")


def test_only_expected_bytes_are_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = FileStore(tmp_path), []
    store.put_new("blob", [bytes(100)])
    blob = store.open("blob")
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, __: asked.append((start, size)))
    blob.expect(10, 30)
    blob.expect(30, 30)  # zero bytes would mean everything that follows
    assert asked == [(10, 20)]
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: os.fstat(-1))
    blob.expect(10, 30)  # only a hint


def test_reading_cached_bytes_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_new("one", [bytes(64 << 12)])
    blob = store.open("one")
    if blob.read_now(bytearray(64 << 12), 0):
        pytest.skip("this file system keeps what was written, so there is nothing cold to see")
    out = bytearray(b"x" * (1 << 12))
    blob.pread_into(bytearray(1 << 12), 32 << 12)
    if not blob.read_now(out, 32 << 12):
        pytest.skip("this file system cannot tell what is in memory")
    assert out == bytes(1 << 12)


def test_a_truncated_file_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_new("one", [b"x" * 10_000])
    blob = store.open("one")
    os.truncate(tmp_path / "one", 5_000)
    assert blob.pread_into(bytearray(10_000), 0) == 5_000
    assert not blob.read_now(bytearray(10_000), 0)
    with pytest.raises(Unavailable):
        blob.read_direct(aligned_buffer(20_480), 0, 10_000)


def test_addresses_are_those_of_the_first_byte() -> None:
    buffer = aligned_buffer(1 << 16)
    assert address_of(buffer) % 4096 == 0
    assert address_of(buffer[100:]) == address_of(buffer) + 100


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_is_not_a_storage_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = FileStore(tmp_path)
    store.put_new("a", [b"content"])

    def refuse(*_: object) -> int:
        raise OSError(number, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(Busy, match="too many files are open"):
            store.put_new("b", [b"content"])
        with pytest.raises(Busy, match="too many files are open"):
            store.open("a")
        assert isinstance(storage_failed(OSError(number, "Too many open files")), Busy)
    assert store.get("a") == b"content"
    store.put_new("b", [b"content"])


# Blobs cached in memory


def no_disk(*_: object) -> int:
    raise OSError(errno.EIO, "the disk is not to be asked")


def test_the_newest_blobs_are_cached_and_the_oldest_evicted(tmp_path: Path) -> None:
    store = FileStore(tmp_path, kept_bytes=16 * PAGE, clock=SimulatedClock())
    for name in "abcd":
        store.put_new(name, [bytes(4 * PAGE)])
    assert [name for name in "abcd" if store.open(name).is_cached] == ["a", "b", "c", "d"]
    store.put_new("e", [bytes(PAGE + 1)])
    assert [name for name in "abcde" if store.open(name).is_cached] == ["b", "c", "d", "e"]
    store.delete("c")
    store.put_new("f", [bytes(4 * PAGE)])
    assert [name for name in "abdef" if store.open(name).is_cached] == ["b", "d", "e", "f"], (
        "a deleted blob no longer counts"
    )
    store.put_new("g", [bytes(16 * PAGE)])
    assert not store.open("g").is_cached, "there is no memory to write the next one from"
    assert store.get("g") == bytes(16 * PAGE)


def test_a_cache_size_of_zero_caches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []

    def advise(descriptor: int, *_: int) -> None:
        forgotten.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".pws")[0])

    monkeypatch.setattr(os, "posix_fadvise", advise)
    store = FileStore(tmp_path)
    store.put_new("a.pws", [bytes(10)])
    assert forgotten == [".a"]
    assert not store.open("a.pws").is_cached


def test_a_cached_blob_is_read_without_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(7).randbytes(5 * PAGE + 17)
    store = FileStore(tmp_path, kept_bytes=64 * PAGE)
    store.put_new("a", [content[:100], content[100:]])
    blob = store.open("a")
    monkeypatch.setattr(os, "preadv", no_disk)
    for start, stop in (
        (0, len(content)),
        (PAGE - 1, PAGE + 1),
        (2 * PAGE, 4 * PAGE),
        (len(content) - 1, len(content)),
    ):
        out = bytearray(stop - start)
        assert blob.read_now(out, start)
        assert out == content[start:stop]
    assert store.get("a", 5) == content[5:]
    assert not blob.read_now(bytearray(2), len(content) - 1), "the blob ends there"
    store.delete("a")
    assert not blob.is_cached
    assert not blob.read_now(bytearray(1), 0)


class SlowMemory:
    """A clock on which each new block of memory takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.made = 0.0, 0
        monkeypatch.setattr("polywire.store.blob_cache.touch", self._touch)

    def _touch(self, _: memoryview) -> None:
        self.now += 1.0
        self.made += 1

    def monotonic(self) -> float:
        return self.now

    def now_us(self) -> int:
        return int(self.now * 1e6)


def test_slow_memory_allocation_is_limited_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SlowMemory(monkeypatch)
    store = FileStore(tmp_path, kept_bytes=64 * PAGE, clock=memory)  # 16 blocks of 4 pages
    for number in range(40):
        store.put_new(f"b{number}", [bytes(4 * PAGE)])
    assert memory.made == 12, "as much as is needed to write from"
    assert [number for number in range(40) if store.open(f"b{number}").is_cached] == list(range(28, 40))
    memory.now += 1000.0
    for number in range(40, 60):
        store.put_new(f"b{number}", [bytes(4 * PAGE)])
    assert memory.made == 16
    assert [number for number in range(60) if store.open(f"b{number}").is_cached] == list(range(44, 60))


def test_cached_memory_is_not_reused_while_it_is_read() -> None:
    kept = BlobCache(16 * PAGE, SimulatedClock())
    blocks = [kept.take() for _ in range(16)]
    assert None not in blocks
    assert kept.take() is None, "all of it is in use"
    first = blocks[0]
    assert first is not None
    first[:] = b"x" * PAGE
    kept.add("a", [first], PAGE)
    reading = kept.find("a")
    assert reading is not None
    view = first[:10]
    del first
    blocks.clear()
    found = [kept.take() for _ in range(16)]
    assert found.count(None) == 1
    assert not reading.is_valid, "it was evicted"
    assert bytes(view) == b"x" * 10
    del view
    assert kept.take() is not None


def in_parts(content: bytes) -> list[bytes]:
    return [content[at : at + 1000] for at in range(0, len(content), 1000)]


@pytest.mark.parametrize("make_parts", [in_parts, Copied])
def test_without_memory_a_blob_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_parts: Callable[[bytes], Iterable[bytes]]
) -> None:
    content = random.Random(8).randbytes(9 * PAGE + 5)
    store = FileStore(tmp_path, kept_bytes=16 * PAGE, clock=SimulatedClock())
    allocate, left = allocate_lasting, [3]

    def refuse(size: int) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return allocate(size)

    monkeypatch.setattr(allocation, "allocate_lasting", refuse)
    for name in "ab":
        store.put_new(name, make_parts(content))
        assert (tmp_path / name).read_bytes() == content
        assert not store.open(name).is_cached


@pytest.mark.parametrize("size", [0, 1, PAGE, 5 * PAGE + 17, 8 * PAGE])
def test_parts_are_copied_into_the_memory_of_the_cache(tmp_path: Path, size: int) -> None:
    content = random.Random(9).randbytes(size)
    store, parts = FileStore(tmp_path, kept_bytes=64 * PAGE), Copied(content)
    store.put_new("a", parts)
    assert set(parts.requested) == {BlobCache(64 * PAGE).block_bytes}, "nothing is copied twice"
    assert (tmp_path / "a").read_bytes() == content
    assert store.open("a").is_cached
    assert store.get("a") == content


# Writes past the page cache


SIZES = [
    0,
    1,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    STRETCH_BYTES - 1,
    STRETCH_BYTES,
    STRETCH_BYTES + 1,
    3 * STRETCH_BYTES + 5 * PAGE + 3,
]


@pytest.mark.parametrize("kept_bytes", [0, 16 * PAGE, 64 << 20])
@pytest.mark.parametrize("how", ["as it is", "no flag", "no write", "short"])
def test_a_blob_is_complete_after_short_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, kept_bytes: int
) -> None:
    write, control, chance = os.pwritev, fcntl.fcntl, random.Random(9)

    def some(descriptor: int, parts: list[memoryview], position: int) -> int:
        past = control(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        size = sum(map(len, parts))
        if past and (how == "no write" or size % PAGE or position % PAGE):
            raise OSError(errno.EINVAL, "Invalid argument")
        if how == "short" and size > 1 and chance.random() < 0.5:
            parts = [parts[0][: chance.randrange(1, len(parts[0]) + 1)]]
            past and control(descriptor, fcntl.F_SETFL, 0)
            try:
                return write(descriptor, parts, position)
            finally:
                past and control(descriptor, fcntl.F_SETFL, past)
        return write(descriptor, parts, position)

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, flags)

    monkeypatch.setattr(os, "pwritev", some)
    if how == "no flag":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    store = FileStore(tmp_path, kept_bytes=kept_bytes)
    content = random.Random(10).randbytes(SIZES[-1])
    for size in SIZES:
        name = f"of.{size}"
        store.put_new(name, [content[at : min(at + 999_999, size)] for at in range(0, size, 999_999)])
        store.put_new(f"{name}.copied", Copied(content[:size]))
        for found in (name, f"{name}.copied"):
            assert (tmp_path / found).read_bytes() == content[:size]
            assert store.get(found) == content[:size]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_disk_error_while_the_next_part_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    write, calls = os.pwritev, [0]

    def fail(descriptor: int, parts: list[memoryview], position: int) -> int:
        calls[0] += 1
        if calls[0] == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, parts, position)

    monkeypatch.setattr(os, "pwritev", fail)
    store = FileStore(tmp_path, kept_bytes=64 << 20)
    gc.collect()
    before = descriptors(tmp_path)
    with pytest.raises(Busy, match="disk is full"):
        store.put_new("a", [bytes(STRETCH_BYTES)] * 2 + [b"the rest"])
    assert list(tmp_path.iterdir()) == []
    assert descriptors(tmp_path) == before
    store.put_new("a", [b"sound"])
    assert store.get("a") == b"sound"
    assert store.open("a").is_cached


def test_a_blob_whose_name_another_writer_took_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, kept_bytes=30_000)
    FileStore(tmp_path).put_new("a", [b"theirs"])
    monkeypatch.setattr("polywire.store.file.exists", lambda *_: False)
    with pytest.raises(BlobExists):
        store.put_new("a", [b"ours"])
    assert not store.open("a").is_cached


def test_memory_for_many_reads_uses_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = allocate_lasting(5 * LARGE_PAGE_BYTES // 2)
    assert len(found) == 3 * LARGE_PAGE_BYTES
    assert len(aligned_buffer(5 * LARGE_PAGE_BYTES // 2)) == 5 * LARGE_PAGE_BYTES // 2
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert address_of(memoryview(found)) % LARGE_PAGE_BYTES == 0 or os.uname().release < "6.7"
    assert len(allocate_lasting(4096)) == 4096
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    assert bytes(memoryview(allocate_lasting(LARGE_PAGE_BYTES))[:3]) == bytes(3)


@pytest.mark.parametrize(
    "fail",
    [
        lambda file: file.read(bytearray(8), 0),
        lambda file: file.write([b"x"], 0),
        lambda file: file.write([memoryview(bytes(PAGE))], 0, past_cache=True),
        lambda file: file.sync(),
        lambda file: file.sync(data_only=True),
        lambda file: file.truncate(1),
        lambda file: file.allocate(1),
        lambda file: file.lock(),
        lambda file: file.map(),
    ],
    ids=["read", "write", "write past the cache", "sync", "sync of data", "truncate", "allocate", "lock", "map"],
)
def test_an_error_of_an_open_file_has_its_path(
    tmp_path: Path, fail: Callable[[system_files.SystemFile], object]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    file = SYSTEM_FILES.open(path, Access.WRITE)
    os.close(file._descriptor)  # every operation on it fails
    with pytest.raises(OSError) as failed:
        fail(file)
    assert failed.value.filename == str(path)
    assert str(path) in storage_failed(failed.value).message
