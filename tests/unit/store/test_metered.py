"""The meter of a bucket counts each request once by its outcome, and passes results and errors unchanged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from polywire.clock import SystemClock
from polywire.errors import ErrorCode, Unavailable
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.metered import Charge, Meter, MeteredObjects, Outcome, RequestCounts
from polywire.store.objects import ObjectChanged
from polywire.testing.memory_objects import MemoryObjects, ObjectFault


def counts(asked: RequestCounts) -> dict[tuple[str, str], int]:
    return {(verb, outcome.value): durations.count for (verb, outcome), durations in asked.taken.items()}


def test_every_method_is_counted_by_its_outcome() -> None:
    meter, memory = Meter(SystemClock()), MemoryObjects()
    objects = MeteredObjects(memory, meter)
    objects.create("a/one", [b"123", b"45"])
    with pytest.raises(BlobExists):
        objects.create("a/one", [b"again"])
    objects.put("a/two", b"6789")
    tag = objects.read("a/one").tag
    objects.replace("a/one", b"54321", tag)
    with pytest.raises(ObjectChanged):
        objects.replace("a/one", b"late", tag)
    assert objects.read_range("a/one", 1, 3) == b"43"
    assert objects.read_range("a/one", 3, 3) == b""
    assert objects.size("a/two") == 4
    with pytest.raises(BlobMissing):
        objects.read("a/three")
    assert objects.list("a/") == ["a/one", "a/two"]
    memory.fail("create", ObjectFault.REFUSED)
    with pytest.raises(Unavailable):
        objects.create("a/three", [b"lost"])
    objects.delete("a/two")
    asked = meter.counts()
    assert counts(asked) == {
        ("create", "done"): 1,
        ("create", "refused"): 1,
        ("create", "failed"): 1,
        ("put", "done"): 1,
        ("replace", "done"): 1,
        ("replace", "refused"): 1,
        ("read", "done"): 2,
        ("read", "missing"): 1,
        ("size", "done"): 1,
        ("list", "done"): 1,
        ("delete", "done"): 1,
    }
    assert asked.charged == {Charge.PUT: 6, Charge.GET: 4, Charge.LIST: 1, Charge.DELETE: 1}
    assert (asked.put_bytes, asked.got_bytes) == (5 + 4 + 5, 5 + 2)
    assert all(durations.sum_s > 0 for durations in asked.taken.values())


def test_a_long_listing_is_charged_per_page() -> None:
    class Many(MemoryObjects):
        def list(self, prefix: str) -> list[str]:
            return [f"{prefix}{number}" for number in range(2_001)]

    meter = Meter(SystemClock())
    assert len(MeteredObjects(Many(), meter).list("a/")) == 2_001
    assert meter.counts().charged[Charge.LIST] == 3
    assert counts(meter.counts()) == {("list", "done"): 1}


def test_returned_counts_do_not_change_later() -> None:
    meter = Meter(SystemClock())
    meter.count("read", Outcome.DONE, 0.1)
    asked = meter.counts()
    meter.count("read", Outcome.DONE, 0.1)
    assert counts(asked) == {("read", "done"): 1}


def test_threads_lose_no_count() -> None:
    meter = Meter(SystemClock())
    objects = MeteredObjects(MemoryObjects(), meter)

    def work(number: int) -> None:
        for _ in range(200):
            with suppress(BlobExists):
                objects.create(f"a/{number % 3}", [b"12"])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert counts(meter.counts()) == {("create", "done"): 3, ("create", "refused"): 8 * 200 - 3}
    assert meter.counts().put_bytes == 6


def test_a_failure_passes_unchanged() -> None:
    class Broken(MemoryObjects):
        def size(self, name: str) -> int:
            raise Unavailable(ErrorCode.STORAGE_FAILED, "unreachable")

    meter = Meter(SystemClock())
    with pytest.raises(Unavailable, match="unreachable"):
        MeteredObjects(Broken(), meter).size("a/one")
    assert counts(meter.counts()) == {("size", "failed"): 1}
