"""Open the broker of a log in a bucket.

* A bucket whose conditional writes do not work is rejected before anything is written.
* The log is recovered in a thread, so that the event loop keeps running.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from polywire.broker.broker import Broker
from polywire.broker.state import State
from polywire.clock import SystemClock
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.worker import MakeWorker, ThreadWorker
from polywire.server.config import ServeConfig
from polywire.store.bucket import REQUEST_TIMEOUT_S
from polywire.store.data_directory import BlobRoot

if TYPE_CHECKING:
    from polywire.cluster.opening import Place
    from polywire.server.bucket_watch import BucketWatch
    from polywire.store.identity import Identity

OPENING: Final = "polywire-opening"  # name of the thread that recovers the log
OPENING_END_S: Final = 1.0  # time for that thread to notice an interruption
BLOB_TIMEOUT_S: Final = 120  # enough to transfer a segment of 64 MiB or more

_Result = TypeVar("_Result")


async def open_in_bucket(
    config: ServeConfig,
    loop: asyncio.AbstractEventLoop,
    watch: BucketWatch,
    *,
    on_failure: Callable[[BrokerError], None],
    blobs_max: int,
    make_worker: MakeWorker = ThreadWorker,
) -> Broker:
    """Become the leader of the log in the bucket, and recover it. Raises BrokerError.

    If the call is cancelled, it does not wait for requests to the bucket.
    """
    from polywire.cluster.opening import ShardOpening

    settings = config.broker_settings()
    own = replace(
        config.log_settings(),
        durability=settings.durability,
        staged_bytes_max=settings.staged_bytes_max,
        open_blobs_max=blobs_max,
    )
    settings, clock = settings.within(own.batch_bytes_max), SystemClock()
    state = State(settings)
    place = await _in_thread(loop, lambda: _place_of(config, watch))
    opening = ShardOpening(place, settings=own, loop=loop, clock=clock, replay=state, make_worker=make_worker)
    try:
        await _in_thread(loop, opening.recover)
    except asyncio.CancelledError:
        opening.interrupt()
        raise
    log = opening.begin()
    log.on_failure(on_failure)
    watch.leads(bucket_id=place.root.mark.hex(), node=place.node, shard=opening.state)
    return Broker.over(lambda _: log, settings=settings, loop=loop, clock=clock, state=state)


async def _in_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], _Result]) -> _Result:
    """Run ``work`` in a new thread, and return its result."""
    thread = ThreadPoolExecutor(1, OPENING)
    try:
        return await loop.run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)


def is_left_opening() -> bool:
    """Return whether an interrupted recovery is still running after ``OPENING_END_S``."""
    for thread in threading.enumerate():
        if thread.name.startswith(OPENING):
            thread.join(OPENING_END_S)
            return thread.is_alive()
    return False


def _place_of(config: ServeConfig, watch: BucketWatch) -> Place:
    """Check that this broker can lead the log, and return its location. Raises BrokerError."""
    from polywire.cluster.bucket_probe import check
    from polywire.cluster.opening import Place
    from polywire.store.identity import make_identity
    from polywire.store.objects import shard_root

    objects, candidate = watch.open(timeout_s=REQUEST_TIMEOUT_S), watch.candidate
    if candidate.shards == 1:  # with several shards, the parent process has checked the bucket
        check(objects)
    identity, _ = make_identity(objects, secrets.token_bytes, SystemClock().now_us(), shards=candidate.shards)
    check_identity(identity, candidate.shards)
    return Place(
        objects=objects,
        blobs=watch.open(timeout_s=BLOB_TIMEOUT_S),
        directory=config.data_dir,
        node=candidate.name,
        cache_bytes=int(config.cache_gib * 2**30),
        delete_grace_s=config.delete_grace_s,
        root=BlobRoot(config.bucket, identity.mark, shard_root(candidate.shard)),
        shard=candidate.shard,
    )


def check_identity(identity: Identity, processes: int) -> None:
    """Raise Invalid(INVALID_REQUEST) if this broker must not open the log.

    An import into the bucket is incomplete, or the number of shards is not the number of processes.
    """
    if identity.importing:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, "an import into this bucket is incomplete (run polywire cluster import again)"
        )
    if identity.shards != processes:
        shards = "1 shard" if identity.shards == 1 else f"{identity.shards} shards"
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the log in this bucket has {shards} (use --processes {identity.shards}, or remove --processes)"
            f" processes={processes}",
        )
