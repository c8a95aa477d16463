"""The shards of a bucket. Each has its own directory, so code for one shard needs no shard number."""

from __future__ import annotations

from typing import Final

from polywire.store.objects import Objects
from polywire.store.rooted import Rooted
from polywire.types import shard_name

FIRST: Final = 0  # most buckets have no other shard


def shard_root(shard: int) -> str:
    """Return the prefix of a shard's object names."""
    return f"shards/{shard_name(shard)}/"


def of_shard(objects: Objects, shard: int) -> Rooted:
    """Return the objects of one shard."""
    return Rooted(objects, shard_root(shard))
