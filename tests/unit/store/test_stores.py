"""The store port: the same scenarios for every store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.errors import ErrorCode, Invalid
from polywire.store.base import BLOCK_BYTES, CHUNK_BYTES, BlobExists, BlobMissing, Store, aligned_buffer
from polywire.store.file import FileStore
from polywire.testing.faulty_store import FaultyStore
from tests.memory_store import MemoryStore


@pytest.fixture(params=["memory", "files", "faulty"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "memory":
            return MemoryStore()
        case "faulty":
            return FaultyStore(MemoryStore())
        case _:
            return FileStore(tmp_path)


SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, CHUNK_BYTES - 8, CHUNK_BYTES, CHUNK_BYTES + 4097]


@pytest.mark.parametrize("size", SIZES)
def test_a_blob_reads_back(store: Store, size: int) -> None:
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    store.put_new("blobs/one", [content[: size // 3], memoryview(content)[size // 3 :]])
    assert store.size("blobs/one") == size
    assert store.get("blobs/one") == content
    assert store.get("blobs/one", 5, 300) == content[5:300]
    assert store.get("blobs/one", size - size // 2) == content[size - size // 2 :]
    assert store.get("blobs/one", size + 5, size + 9) == b""
    blob = store.open("blobs/one")
    assert blob.size == size
    whole = bytearray(size)
    if blob.read_now(whole, 0):
        assert whole == content
    assert not blob.read_now(bytearray(size + 1), 0), "it ends earlier"
    out = bytearray(100)
    assert blob.pread_into(out, 50) == len(content[50:150])
    assert out[: len(content[50:150])] == content[50:150]


def test_parts_can_share_memory(store: Store) -> None:
    chunk = bytearray(2 * BLOCK_BYTES)
    wanted = bytearray()

    def parts() -> Iterator[memoryview]:
        for number, size in enumerate((8192, 8192, 4096, 100, 8192, 3)):
            chunk[:] = bytes([number]) * len(chunk)
            wanted.extend(chunk[:size])
            yield memoryview(chunk)[:size]

    store.put_new("one", parts())
    assert store.get("one") == wanted


def test_a_name_is_never_overwritten(store: Store) -> None:
    store.put_new("one", [b"first"])
    with pytest.raises(BlobExists):
        store.put_new("one", [b"second"])
    assert store.get("one") == b"first"


def test_a_blob_can_get_a_second_name(store: Store) -> None:
    store.put("blobs/one", [b"fir", b"st"])
    blob = store.open("blobs/one")
    store.put("blobs/one", (part for part in (b"sec", b"ond")))
    assert store.get("blobs/one") == b"second"
    found = bytearray(5)
    assert blob.pread_into(found, 0) == 5
    assert found == b"first", "an open blob stays readable"
    with pytest.raises(BlobExists):
        store.put_new("blobs/one", [b"third"])
    assert store.list("blobs/") == ["blobs/one"]


def test_one_of_many_concurrent_writers_succeeds(store: Store) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def write(number: int) -> None:
        barrier.wait()
        try:
            store.put_new("blobs/one", [bytes([number]) * 100_000])
            outcomes.append(f"won {number}")
        except BlobExists:
            outcomes.append("lost")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [outcome for outcome in outcomes if outcome != "lost"]
    if isinstance(store, FileStore):  # the stores in memory are single-threaded
        assert len(won) == 1
        assert store.get("blobs/one") == bytes([int(won[0][4:])]) * 100_000
    assert store.list("blobs/") == ["blobs/one"]


def test_a_failing_source_leaves_nothing(store: Store, tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(100_000)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put_new("blobs/one", parts())
    assert store.list("blobs/") == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    store.put_new("blobs/one", [b"again"])


def test_lists_are_sorted_and_cover_one_directory(store: Store) -> None:
    assert store.list("") == store.list("blobs/") == []
    for name in ("b", "a-2", "a-1", "blobs/z", "blobs/a", "other/a"):
        store.put_new(name, [b""])
    assert store.list("") == ["a-1", "a-2", "b"]
    assert store.list("a") == ["a-1", "a-2"]
    assert store.list("blobs/") == ["blobs/a", "blobs/z"]
    assert store.list("blobs/z") == ["blobs/z"]
    assert store.list("blobs") == store.list("none/") == []


def test_missing_blobs_raise(store: Store) -> None:
    for read in (store.get, store.open, store.size):
        with pytest.raises(BlobMissing):
            read("blobs/one")
    store.delete("blobs/one")
    store.put_new("blobs/one", [b"x"])
    store.delete("blobs/one")
    with pytest.raises(BlobMissing):
        store.get("blobs/one")
    store.put_new("blobs/one", [b"y"])
    assert store.get("blobs/one") == b"y"


def test_an_open_blob_stays_readable_without_its_name(store: Store) -> None:
    content = bytes(range(256)) * 100
    store.put_new("one", [content])
    blob = store.open("one")
    store.delete("one")
    out = bytearray(19_900)
    assert blob.pread_into(out, 100) == len(out)
    assert out == content[100:20_000]


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/.hidden", "/a", "a/", "a/b/c", "a/../b", "a b", "ä", "x" * 201, "-a", "a\n"]
)
def test_bad_names_are_refused(store: Store, name: str) -> None:
    for call in (lambda: store.put_new(name, []), lambda: store.get(name), lambda: store.delete(name)):
        with pytest.raises(Invalid) as caught:
            call()
        assert caught.value.code is ErrorCode.INVALID_NAME


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 10), (100, 5000), (4095, 4097), (4096, 8192), (8000, 30_000), (0, 30_000)]
)
def test_reading_past_the_cache_returns_the_same_bytes(store: Store, start: int, stop: int) -> None:
    content = bytes(number % 251 for number in range(20_000))
    store.put_new("one", [content])
    block = aligned_buffer(32_768)
    assert store.open("one").read_direct(block, start, stop) == content[start:stop]


def test_reading_past_the_cache_of_a_deleted_blob(store: Store) -> None:
    store.put_new("one", [b"x" * 5000])
    blob = store.open("one")
    store.delete("one")
    assert blob.read_direct(aligned_buffer(16_384), 10, 20) == b"x" * 10
