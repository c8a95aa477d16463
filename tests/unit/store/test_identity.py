"""What a bucket says it is: made once, and refused where it is not known."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from polywire.errors import Invalid
from polywire.store.identity import ID_BYTES, KEY_NAME, NAME, find_identity, make_identity, make_key
from polywire.testing.memory_objects import MemoryObjects, ObjectFault


def test_all_get_the_same() -> None:
    objects = MemoryObjects()
    assert find_identity(objects) is None
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda now: make_identity(objects, secrets.token_bytes, now), range(8)))
    assert sum(made for _, made in found) == 1
    assert {identity for identity, _ in found} == {find_identity(objects)}


def test_a_bucket_that_was_made_before_there_were_several_shards() -> None:
    objects = MemoryObjects()
    objects.put(NAME, b'{"id":"00ff","created_at_us":1,"shards":1,"version":1,"source":"","importing":false}')
    found, made = make_identity(objects, secrets.token_bytes, 2, shards=4)
    assert (found.shards, found.mark, made) == (1, b"\x00\xff", False)


def test_the_number_of_shards_stays() -> None:
    objects = MemoryObjects()
    assert make_identity(objects, secrets.token_bytes, 1, shards=4)[0].shards == 4
    assert make_identity(objects, secrets.token_bytes, 2, shards=8)[0].shards == 4


def test_a_store_that_says_so_too_early_is_asked_again() -> None:
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
def test_what_is_not_known_is_refused(content: bytes) -> None:
    objects = MemoryObjects()
    objects.put(NAME, content)
    with pytest.raises(Invalid):
        make_identity(objects, secrets.token_bytes, 1)


def test_processes_know_each_other_by_one_key() -> None:
    objects = MemoryObjects()
    objects.fail("create", ObjectFault.BUSY)
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: make_key(objects, secrets.token_bytes), range(8)))
    assert [len(key) for key in found] == [ID_BYTES]


def test_a_key_that_is_none_is_refused() -> None:
    objects = MemoryObjects()
    objects.put(KEY_NAME, b"short")
    with pytest.raises(Invalid, match="key in the bucket is malformed"):
        make_key(objects, secrets.token_bytes)
