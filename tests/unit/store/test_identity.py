"""The identity of a bucket: created once, and refused if unknown."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from polywire.errors import Invalid
from polywire.store.identity import ID_BYTES, KEY_NAME, NAME, find_identity, make_identity, make_key
from polywire.testing.memory_objects import MemoryObjects, ObjectFault


def test_concurrent_creators_get_the_same_identity() -> None:
    objects = MemoryObjects()
    assert find_identity(objects) is None
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda now: make_identity(objects, secrets.token_bytes, now), range(8)))
    assert sum(made for _, made in found) == 1
    assert {identity for identity, _ in found} == {find_identity(objects)}


def test_an_identity_from_before_several_shards() -> None:
    objects = MemoryObjects()
    objects.put(NAME, b'{"id":"00ff","created_at_us":1,"shards":1,"version":1,"source":"","importing":false}')
    found, made = make_identity(objects, secrets.token_bytes, 2, shards=4)
    assert (found.shards, found.mark, made) == (1, b"\x00\xff", False)


def test_the_number_of_shards_does_not_change() -> None:
    objects = MemoryObjects()
    assert make_identity(objects, secrets.token_bytes, 1, shards=4)[0].shards == 4
    assert make_identity(objects, secrets.token_bytes, 2, shards=8)[0].shards == 4


def test_a_premature_conflict_of_the_store_is_retried() -> None:
    objects = MemoryObjects()
    objects.fail("create", ObjectFault.BUSY)
    assert make_identity(objects, secrets.token_bytes, 1)[1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"id": "x", "created_at_us": 1, "version": 2}',
        b'{"id": "00", "created_at_us": 1, "shards": 65}',
        b'{"id": "00", "created_at_us": 1, "shards": 0}',
    ],
)
def test_unknown_identities_are_refused(content: bytes) -> None:
    objects = MemoryObjects()
    objects.put(NAME, content)
    with pytest.raises(Invalid):
        make_identity(objects, secrets.token_bytes, 1)


def test_processes_share_one_key() -> None:
    objects = MemoryObjects()
    objects.fail("create", ObjectFault.BUSY)
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: make_key(objects, secrets.token_bytes), range(8)))
    assert [len(key) for key in found] == [ID_BYTES]


def test_a_malformed_key_is_refused() -> None:
    objects = MemoryObjects()
    objects.put(KEY_NAME, b"short")
    with pytest.raises(Invalid, match="key in the bucket is malformed"):
        make_key(objects, secrets.token_bytes)
