"""The cache beside a bucket: its size limit, and one request per chunk however often it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

import pytest

from polywire.cluster.bucket_store import AHEAD_MAX, CHUNK_BYTES, TAIL_BYTES, BucketStore
from polywire.errors import Busy, ErrorCode, Unavailable
from polywire.store.base import BlobMissing
from polywire.store.objects import FIRST, of_shard, shard_root
from polywire.store.system_files import SYSTEM_FILES
from polywire.testing.memory_objects import MemoryObjects, ObjectFault
from tests.copied_parts import Copied

SHARD = shard_root(FIRST)

KIB = 1024


class CountedObjects(MemoryObjects):
    """A bucket that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        self.asked["read"] += 1
        return super().read_range(name, start, stop)

    def size(self, name: str) -> int:
        self.asked["size"] += 1
        return super().size(name)


def store_of(objects: MemoryObjects, directory: Path, cache_bytes: int) -> BucketStore:
    directory.mkdir(exist_ok=True)
    return BucketStore(of_shard(objects, FIRST), directory, SYSTEM_FILES, cache_bytes=cache_bytes)


def taken(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_the_cache_never_exceeds_its_limit_even_during_writes(tmp_path: Path) -> None:
    limit, most = 300 * KIB, 0
    store = store_of(MemoryObjects(), tmp_path / "cache", limit)

    def watched(number: int) -> Iterator[bytes]:
        nonlocal most
        for _ in range(5):
            yield bytes([number]) * (20 * KIB)
            most = max(most, taken(tmp_path))

    for number in range(8):
        store.put_new(f"segments/{number}.pws", watched(number))
        most = max(most, taken(tmp_path))
    assert 200 * KIB < most <= limit
    for number in range(8):
        assert store.get(f"segments/{number}.pws") == bytes([number]) * (100 * KIB)
    store.put_new("segments/large.pws", [bytes(limit + 1)])
    assert taken(tmp_path) == 0, "a blob larger than the cache is not cached"
    assert store.size("segments/large.pws") == limit + 1


def test_parts_that_are_copied_into_memory_evict_files_before_they_are_written(tmp_path: Path) -> None:
    limit, most, directory = 700 * KIB, 0, tmp_path / "cache"
    directory.mkdir()
    store = BucketStore(
        of_shard(MemoryObjects(), FIRST), directory, SYSTEM_FILES, cache_bytes=limit, memory_bytes=512 * KIB
    )

    def watch() -> None:
        nonlocal most
        most = max(most, taken(tmp_path))

    for number in range(5):
        store.put_new(f"segments/{number}.pws", Copied(bytes([number]) * (300 * KIB), watch))
    watch()
    assert 500 * KIB < most <= limit


def in_parts(content: bytes) -> list[bytes]:
    return [content[at : at + 33_333] for at in range(0, len(content), 33_333)]


@pytest.mark.parametrize("make_parts", [in_parts, Copied])
@pytest.mark.parametrize("memory_bytes", [0, 600 * KIB, 20_000 * KIB])
def test_a_new_blob_is_cached_in_memory_if_it_fits(
    tmp_path: Path, memory_bytes: int, make_parts: Callable[[bytes], Iterable[bytes]]
) -> None:
    objects, chance, directory = MemoryObjects(), Random(3), tmp_path / "cache"
    directory.mkdir()
    store = BucketStore(
        of_shard(objects, FIRST), directory, SYSTEM_FILES, cache_bytes=1 << 30, memory_bytes=memory_bytes
    )
    contents = {f"segments/{size}.pws": chance.randbytes(size) for size in (1, 4096, 70_000, 300_001, 5_000_003)}
    for name, content in contents.items():
        store.put_new(name, make_parts(content))
        assert objects.read(SHARD + name).content == content
        out = bytearray(len(content))
        assert store.open(name).is_cached == (memory_bytes > 2 * len(content))
        assert store.open(name).pread_into(out, 0) == len(content)
        assert out == content
    names = [name for name in contents if store.open(name).is_cached]
    assert names == (list(contents) if memory_bytes > 10_000 * KIB else []), "the large one evicts the others"
    for name in names:
        (directory / name).write_bytes(b"")
        out = bytearray(len(contents[name]))
        assert store.open(name).read_now(out, 0), "the cache file was not read"
        assert out == contents[name]


@pytest.mark.parametrize("cache_bytes", [0, 3 * CHUNK_BYTES, 100 * CHUNK_BYTES])
def test_small_reads_return_the_right_bytes(tmp_path: Path, cache_bytes: int) -> None:
    objects, chance = MemoryObjects(), Random(7)
    content = chance.randbytes(5 * CHUNK_BYTES + 12345)
    objects.put(f"{SHARD}segments/a.pws", content)
    store = store_of(objects, tmp_path / "cache", cache_bytes)
    blob = store.open("segments/a.pws")
    for _ in range(200):
        start = chance.randrange(len(content))
        stop = start + chance.choice((1, 100, 5000, 200_000, CHUNK_BYTES + 1))
        out = bytearray(stop - start)
        count = blob.pread_into(out, start)
        assert out[:count] == content[start:stop]
        assert store.get("segments/a.pws", start, stop) == content[start:stop]
        assert taken(tmp_path) <= cache_bytes
    with pytest.raises(BlobMissing):
        store.get("segments/b.pws", 0, 10)


def test_a_chunk_is_fetched_once_and_again_if_its_file_is_damaged(tmp_path: Path) -> None:
    objects = CountedObjects()
    content = Random(1).randbytes(3 * CHUNK_BYTES)
    objects.put(f"{SHARD}segments/a.pws", content)
    store = store_of(objects, tmp_path / "cache", 10 * CHUNK_BYTES)
    for at in range(0, CHUNK_BYTES - 500, 5000):
        assert store.get("segments/a.pws", at, at + 500) == content[at : at + 500]
    assert objects.asked["read"] == 1
    for path in tmp_path.rglob("*.pws.*"):
        path.write_bytes(b"short")
    assert store.get("segments/a.pws", 10, 20) == content[10:20]
    assert objects.asked["read"] == 2


def test_tails_are_prefetched_and_failed_ones_are_fetched_again(tmp_path: Path) -> None:
    objects = CountedObjects()
    names = [f"segments/{number:04}.pws" for number in range(AHEAD_MAX + 50)]
    contents = {name: Random(name).randbytes(TAIL_BYTES // 2 + 7 * at) for at, name in enumerate(names)}
    for name, content in contents.items():
        objects.put(SHARD + name, content)
    store = store_of(objects, tmp_path / "cache", 0)
    objects.fail("read_range", ObjectFault.REFUSED, after=3)
    objects.delete(SHARD + names[60])
    store.read_ahead(names)
    for name in names:
        if name == names[60]:
            with pytest.raises(BlobMissing):
                store.size(name)
            continue
        size = store.size(name)
        assert size == len(contents[name])
        assert store.get(name, size - 64, size) == contents[name][-64:]
        assert store.get(name, 10, 20) == contents[name][10:20]
    assert objects.asked["size"] <= len(names) + 1, "one request each"
    store.read_ahead(())
    assert store.get(names[0], 10, 20) == contents[names[0]][10:20]


def test_an_unreachable_bucket_is_not_hidden_by_tails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.cluster.bucket_store.PAUSE_FIRST_S", 0.001)

    class Out(MemoryObjects):
        def size(self, name: str) -> int:
            raise Unavailable(ErrorCode.STORAGE_FAILED, "out")

    store = store_of(Out(), tmp_path / "cache", 0)
    store.read_ahead(["segments/a.pws"])
    with pytest.raises(Busy, match="out"):
        store.size("segments/a.pws")
    store.read_ahead(())
