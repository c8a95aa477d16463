"""The shards of a bucket: how many there may be, what they are called, where each lies.

Promises: a shard's objects are below its own directory and nowhere else, so that what works on one of them needs no word for it.
Must not know: what a shard holds.
"""

from __future__ import annotations

from typing import Final

from polywire.store.objects import Objects
from polywire.store.rooted import Rooted
from polywire.types import shard_name

FIRST: Final = 0  # the only one of most buckets


def shard_root(shard: int) -> str:
    """What stands before the names of a shard's objects."""
    return f"shards/{shard_name(shard)}/"


def of_shard(objects: Objects, shard: int) -> Rooted:
    """The objects of one shard."""
    return Rooted(objects, shard_root(shard))
