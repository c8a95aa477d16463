"""A broker whose log lies in a bucket.

Promises: nothing of it is imported where there is no bucket; a store that does not keep its conditional writes is refused before anything is
written. Must not know: how the log is stored.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from polywire.broker.broker import Broker
from polywire.clock import SystemClock
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.base import Log, Replay
from polywire.names import is_simple
from polywire.server.config import ServeConfig
from polywire.store.mark import BlobRoot

BLOB_TIMEOUT_S: Final = 120  # of a segment of 64 MiB and more
NODE_LENGTH_MAX: Final = 100


def open_in_bucket(
    config: ServeConfig,
    loop: asyncio.AbstractEventLoop,
    *,
    on_failure: Callable[[BrokerError], None],
    blobs_max: int,
) -> Broker:
    """Lead the log in the bucket. Raises BrokerError."""
    from polywire.cluster.journal_objects import SHARD
    from polywire.cluster.opening import Place, open_shard
    from polywire.cluster.probe import check
    from polywire.store.identity import make_identity
    from polywire.store.url import open_bucket

    objects, clock = open_bucket(config.bucket), SystemClock()
    check(objects)
    identity, _ = make_identity(objects, secrets.token_bytes, clock.now_us())
    if identity.importing:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, "an import into this bucket was broken off: run polywire cluster import again"
        )
    place = Place(
        objects=objects,
        blobs=open_bucket(config.bucket, timeout_s=BLOB_TIMEOUT_S),
        directory=config.data_dir,
        node=node_name(config),
        cache_bytes=int(config.cache_gib * 2**30),
        root=BlobRoot(config.bucket, identity.mark, SHARD),
    )
    settings = config.broker_settings()
    own = replace(
        config.log_settings(),
        durability=settings.durability,
        staged_bytes_max=settings.staged_bytes_max,
        open_blobs_max=blobs_max,
    )

    def recover(state: Replay) -> Log:
        log = open_shard(place, settings=own, loop=loop, clock=clock, replay=state)
        log.on_failure(on_failure)
        return log

    return Broker.over(recover, settings=settings.within(own.batch_bytes_max), loop=loop, clock=clock)


def node_name(config: ServeConfig) -> str:
    """The broker's name among those of the bucket. Raises Invalid."""
    name = config.node or platform.node() or "node"
    if not is_simple(name) or not 0 < len(name) <= NODE_LENGTH_MAX:
        raise Invalid(
            ErrorCode.INVALID_NAME, f"a node's name is at most {NODE_LENGTH_MAX} plain characters name={name!r}"
        )
    return name
