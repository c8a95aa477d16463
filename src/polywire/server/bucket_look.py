"""Check a bucket before the broker's processes are forked.

The checks run in a child process: the libraries for buckets start threads, and a process with threads must not fork. A
bucket whose conditional writes do not work is rejected before anything is written.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from polywire.clock import SystemClock
from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable
from polywire.server.bucket import check_identity
from polywire.server.config import ServeConfig
from polywire.store.bucket import REQUEST_TIMEOUT_S
from polywire.store.url import open_bucket

POLL_S: Final = 0.25
_READ_BYTES: Final = 64 * 1024


class _Answer(msgspec.Struct, frozen=True):
    """The result of a check in the child process, or its error."""

    shards: int = 1
    key: bytes = b""
    code: str = ""
    message: str = ""


def look(config: ServeConfig) -> tuple[int, bytes]:
    """Return the number of shards in the bucket, and the shared key of the processes if there are several.

    In an empty bucket, create a log with one shard for each configured process. Raises Unavailable, and Invalid if the
    bucket has another number of shards than configured.
    """
    answer = _in_child(lambda: _look(config))
    return answer.shards, answer.key


def check_machine(config: ServeConfig, shards: int) -> None:
    """Raise Invalid if a running machine uses this node name. Raises Unavailable.

    If a machine with this name was killed recently, the check takes some seconds.
    """
    _in_child(lambda: _check_machine(config, shards))


def _look(config: ServeConfig) -> _Answer:
    from polywire.cluster.bucket_probe import check
    from polywire.store.identity import find_identity, make_identity, make_key

    objects = open_bucket(config.bucket, timeout_s=REQUEST_TIMEOUT_S)
    identity, wanted = find_identity(objects), config.processes
    if max(wanted if identity is None else identity.shards, 1) == 1:
        if identity is not None:
            check_identity(identity, wanted or 1)
        return _Answer()  # a single process makes the other checks itself
    check(objects)
    if identity is None:
        identity, _ = make_identity(objects, secrets.token_bytes, SystemClock().now_us(), shards=wanted)
    check_identity(identity, wanted or identity.shards)
    return _Answer(identity.shards, make_key(objects, secrets.token_bytes))


def _check_machine(config: ServeConfig, shards: int) -> _Answer:
    """Watch the objects that a machine with this name writes to the bucket.

    One change can be the last write of a killed process. A second change means that the machine is running.
    """
    from polywire.cluster.nodes import LOOK_S, Node, Nodes
    from polywire.server.candidates import candidate_of

    name, nodes = candidate_of(config, 0, shards).machine, Nodes(open_bucket(config.bucket))

    def read() -> dict[str, Node]:
        return {node.name: node for node in nodes.read() if node.machine == name}

    end, known, changes = time.monotonic() + LOOK_S, read(), Counter[str]()
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
        known, end = found, time.monotonic() + LOOK_S if changed else end
    nodes.undrain(name)  # a drain that was requested during the previous run of the machine is over
    return _Answer()


def _in_child(check: Callable[[], _Answer]) -> _Answer:
    """Run a check in a child process. Raises Invalid, Unavailable.

    The parent must not have threads, because it forks later.
    """
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
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
