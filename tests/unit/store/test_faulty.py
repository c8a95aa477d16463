"""The faulty store injects exactly the requested faults."""

from __future__ import annotations

import pytest

from polywire.errors import Unavailable
from polywire.testing.faulty_store import Fault, FaultyStore, Verb
from tests.memory_store import MemoryStore


def test_errors_take_effect_before_the_operation() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    store.fail(Verb.PUT_NEW, Fault.ERROR)
    with pytest.raises(Unavailable):
        store.put_new("a", [b"x"])
    assert inner.list("") == []
    store.put_new("a", [b"x"])
    for verb, call in (
        (Verb.GET, store.get),
        (Verb.OPEN, store.open),
        (Verb.SIZE, store.size),
        (Verb.LIST, store.list),
    ):
        store.fail(verb, Fault.ERROR)
        with pytest.raises(Unavailable):
            call("a")
        call("a")
    assert store.pending == 0


def test_lost_replies_take_effect_after_the_operation() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    store.fail(Verb.PUT_NEW, Fault.LOST_REPLY, after=1)
    store.fail(Verb.DELETE, Fault.LOST_REPLY)
    assert store.pending == 2
    store.put_new("a", [b"x"])
    with pytest.raises(Unavailable):
        store.put_new("b", [b"y"])
    assert inner.get("b") == b"y"
    with pytest.raises(Unavailable):
        store.delete("a")
    assert inner.list("") == ["b"]


def test_torn_blobs_are_half_written() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    store.fail(Verb.PUT_NEW, Fault.TORN)
    with pytest.raises(Unavailable):
        store.put_new("a", [b"abcd", b"efgh"])
    assert inner.get("a") == b"abcd"
    store.fail(Verb.GET, Fault.TORN)
    assert (store.get("a"), store.get("a")) == (b"ab", b"abcd")


def test_stale_lists_lack_the_newest_blobs() -> None:
    store = FaultyStore(MemoryStore())
    for name in ("a", "c", "b"):
        store.put_new(name, [])
    store.fail(Verb.LIST, Fault.STALE)
    assert (store.list(""), store.list("")) == (["a", "c"], ["a", "b", "c"])


def test_slow_calls_wait_and_succeed() -> None:
    waits: list[int] = []
    store = FaultyStore(MemoryStore(), wait=lambda: waits.append(1))
    store.fail(Verb.PUT_NEW, Fault.SLOW)
    store.put_new("a", [b"x"])
    assert (waits, store.get("a")) == ([1], b"x")
    assert store.calls == [(Verb.PUT_NEW, "a"), (Verb.GET, "a")]


def test_faults_apply_to_their_methods_only() -> None:
    with pytest.raises(ValueError):
        FaultyStore(MemoryStore()).fail(Verb.GET, Fault.STALE)
