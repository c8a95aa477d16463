"""Check a bucket, and open a broker whose log is stored in it.

* A bucket without working conditional writes is rejected before anything is written.
* The first check runs in a child process: the client libraries of object stores start threads, and a process with
  threads must not fork.
* The log is recovered in a thread, so that the event loop can still respond to clients.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from polywire.broker.broker import Broker
from polywire.broker.groups import delay_index
from polywire.broker.state import State
from polywire.clock import SystemClock
from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable
from polywire.log.worker import MakeWorker, ThreadWorker
from polywire.server.config import ServeConfig
from polywire.store.bucket import REQUEST_TIMEOUT_S
from polywire.store.data_directory import BlobRoot
from polywire.store.url import open_bucket

if TYPE_CHECKING:
    from polywire.cluster.opening import ShardConfig
    from polywire.server.bucket_watch import BucketWatch
    from polywire.store.identity import Identity
    from polywire.store.objects import Objects


OPENING: Final = "polywire-opening"  # name of the thread that recovers the log
OPENING_END_S: Final = 1.0  # time for that thread to notice an interruption
BLOB_TIMEOUT_S: Final = 120  # enough to transfer a segment of 64 MiB or more

_Result = TypeVar("_Result")
POLL_S: Final = 0.25
_READ_BYTES: Final = 64 * 1024


async def open_in_bucket(
    config: ServeConfig,
    loop: asyncio.AbstractEventLoop,
    watch: BucketWatch,
    *,
    on_failure: Callable[[BrokerError], None],
    blobs_max: int,
    make_worker: MakeWorker = ThreadWorker,
) -> Broker:
    """Become the leader of the log in the bucket, recover the log, and return its broker.

    Raises BrokerError if that fails. If the call is cancelled, it returns without waiting for requests to the bucket.
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
    shard_config = await in_thread(loop, lambda: _shard_config(config, watch))
    opening = ShardOpening(shard_config, settings=own, loop=loop, clock=clock, replay=state, make_worker=make_worker)
    try:
        await in_thread(loop, opening.recover)
    except asyncio.CancelledError:
        opening.interrupt()
        raise
    log = opening.begin()
    log.on_failure(on_failure)
    log.name_partitions(state.catalog.partition_name)
    watch.leads(bucket_id=shard_config.root.mark.hex(), node=shard_config.node, shard=opening.state)
    delays = config.data_dir / delay_index.FILE
    delay_index.delete(delays)  # another machine may have led the log since it was written
    return Broker.over(
        lambda _: log,
        settings=settings,
        loop=loop,
        clock=clock,
        state=state,
        delays=delays,
        make_worker=make_worker,
    )


async def in_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], _Result]) -> _Result:
    """Run requests to the bucket in a thread. If the call is cancelled, it returns without waiting for them."""
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


def _shard_config(config: ServeConfig, watch: BucketWatch) -> ShardConfig:
    """Check that this broker can lead the log, and return the configuration for it. Raises BrokerError if it cannot."""
    from polywire.cluster.opening import ShardConfig
    from polywire.store.objects import shard_root

    watch.check()
    objects, candidate = watch.open(timeout_s=REQUEST_TIMEOUT_S), watch.candidate
    identity = watch.join(objects, partial(_make_identity, objects, candidate.shards))
    assert identity is not None, "it was created if there was none"
    check_identity(identity, candidate.shards)
    return ShardConfig(
        objects=objects,
        blobs=watch.open(timeout_s=BLOB_TIMEOUT_S),
        directory=config.data_dir,
        node=candidate.name,
        cache_bytes=int(config.cache_gib * 2**30),
        delete_grace_s=config.delete_grace_s,
        root=BlobRoot(config.bucket, identity.mark, shard_root(candidate.shard)),
        shard=candidate.shard,
    )


def _make_identity(objects: Objects, shards: int) -> Identity:
    from polywire.store.identity import make_identity

    return make_identity(objects, secrets.token_bytes, SystemClock().now_us(), shards=shards)[0]


def check_identity(identity: Identity, processes: int) -> None:
    """Raise Invalid(INVALID_REQUEST) if this broker must not open the log.

    That is the case if an import into the bucket is incomplete, or if the log has another number of shards than
    ``processes``.
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


class _Answer(msgspec.Struct, frozen=True):
    shards: int = 1
    key: bytes = b""
    code: str = ""
    message: str = ""


def inspect_bucket(config: ServeConfig) -> tuple[int, bytes]:
    """Return the number of shards in the bucket, and the shared secret of their processes (empty for one shard).

    If the bucket is empty, a log with one shard for each configured process is created. Raises Unavailable, and Invalid
    if the number of shards is not the configured one.
    """
    answer = _in_child(lambda: _inspect(config))
    return answer.shards, answer.key


def check_machine(config: ServeConfig, shards: int) -> None:
    """Raise Invalid if a running machine already uses this node name in the bucket.

    The check takes some seconds if a machine with this name was killed recently. Raises Unavailable if the bucket does
    not respond.
    """
    _in_child(lambda: _check_machine(config, shards))


def _inspect(config: ServeConfig) -> _Answer:
    from polywire.cluster.bucket_probe import check
    from polywire.store.identity import join_log, make_key

    objects = open_bucket(config.bucket, timeout_s=REQUEST_TIMEOUT_S)
    identity, wanted = join_log(objects, config.data_dir), config.processes
    if max(wanted if identity is None else identity.shards, 1) == 1:
        if identity is not None:
            check_identity(identity, wanted or 1)
        return _Answer()  # a single process makes the other checks itself
    check(objects)
    if identity is None:
        identity = join_log(objects, config.data_dir, partial(_make_identity, objects, wanted))
    assert identity is not None, "it was created if there was none"
    check_identity(identity, wanted or identity.shards)
    return _Answer(identity.shards, make_key(objects, secrets.token_bytes))


def _check_machine(config: ServeConfig, shards: int) -> _Answer:
    """Raise Invalid if the heartbeats of another machine with this node name change twice.

    One change can be the last write of a killed process.
    """
    from polywire.cluster.nodes import Node, Nodes, wait_s
    from polywire.server.bucket_watch import candidate_of

    name, nodes = candidate_of(config, 0, shards).machine, Nodes(open_bucket(config.bucket))

    def read() -> dict[str, Node]:
        return {node.name: node for node in nodes.read() if node.machine == name}

    known, changes = read(), Counter[str]()
    end = time.monotonic() + wait_s(known.values())
    while known and time.monotonic() < end:
        time.sleep(POLL_S)
        found = read()
        changed = [node_name for node_name, node in found.items() if known.get(node_name) != node]
        changes.update(changed)
        if max(changes.values(), default=0) > 1:
            raise Invalid(
                ErrorCode.INVALID_NAME,
                f"another machine with this name uses the bucket (give one of them another --node) name={name!r}",
            )
        known, end = found, time.monotonic() + wait_s(found.values()) if changed else end
    nodes.undrain(name)  # a drain that was requested during the previous run of the machine is over
    return _Answer()


def _in_child(check: Callable[[], _Answer]) -> _Answer:
    """Run a check in a child process, because the parent forks later and must not have threads.

    Raises Invalid or Unavailable as the check does.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, msgspec.json.encode(_answer(check)))
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        content = pipe.read(_READ_BYTES)
    os.waitpid(pid, 0)
    if not content:
        raise Unavailable(ErrorCode.STORAGE_FAILED, "the bucket cannot be read")
    answer = msgspec.json.decode(content, type=_Answer)
    if answer.code:
        code = ErrorCode(answer.code)
        kind = Unavailable if code is ErrorCode.STORAGE_FAILED else Invalid
        raise kind(code, answer.message)
    return answer


def _answer(check: Callable[[], _Answer]) -> _Answer:
    try:
        return check()
    except BrokerError as error:
        return _Answer(code=error.code.value, message=error.message)
    except OSError as error:
        return _Answer(code=ErrorCode.STORAGE_FAILED.value, message=f"{error.strerror} file={error.filename}")
