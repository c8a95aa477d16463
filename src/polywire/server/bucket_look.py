"""What has to be known of a bucket before processes are forked for it, found out by a process that ends with the answer.

Promises: the process that asks has no thread afterwards, and no library that makes some; a bucket that does not keep its conditional writes
is refused before anything is written. Must not know: what processes do.
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
    """What was found, or why nothing was."""

    shards: int = 1
    key: bytes = b""
    code: str = ""
    message: str = ""


def look(config: ServeConfig) -> tuple[int, bytes]:
    """How many shards the bucket has, and the key of its processes where there are several; a bucket without a log gets as many as processes
    are asked for. Raises Invalid where processes are asked for, but not so many, Unavailable."""
    answer = _asked(lambda: _look(config))
    return answer.shards, answer.key


def check_machine(config: ServeConfig, shards: int) -> None:
    """Refuse a name that another machine has. Takes some seconds where one had it that was killed. Raises Invalid, Unavailable."""
    _asked(lambda: _check_machine(config, shards))


def _look(config: ServeConfig) -> _Answer:
    from polywire.cluster.probe import check
    from polywire.store.identity import find_identity, make_identity, make_key

    objects = open_bucket(config.bucket, timeout_s=REQUEST_TIMEOUT_S)
    identity, wanted = find_identity(objects), config.processes
    if max(wanted if identity is None else identity.shards, 1) == 1:
        if identity is not None:
            check_identity(identity, wanted or 1)
        return _Answer()  # the one process finds out the rest
    check(objects)
    if identity is None:
        identity, _ = make_identity(objects, secrets.token_bytes, SystemClock().now_us(), shards=wanted)
    check_identity(identity, wanted or identity.shards)
    return _Answer(identity.shards, make_key(objects, secrets.token_bytes))


def _check_machine(config: ServeConfig, shards: int) -> _Answer:
    """A change may be the last that a killed process has asked for; one that lives makes another."""
    from polywire.cluster.nodes import LOOK_S, Node, Nodes
    from polywire.server.candidates import candidate_of

    name, nodes = candidate_of(config, 0, shards).machine, Nodes(open_bucket(config.bucket))

    def read() -> dict[str, Node]:
        return {node.name: node for node in nodes.read() if node.machine == name}

    end, known, changes = time.monotonic() + LOOK_S, read(), Counter[str]()
    while known and time.monotonic() < end:
        time.sleep(POLL_S)
        found = read()
        changed = [one for one, node in found.items() if known.get(one) != node]
        changes.update(changed)
        if max(changes.values(), default=0) > 1:
            raise Invalid(
                ErrorCode.INVALID_NAME,
                f"another machine with this name uses the bucket (give one of them another --node) name={name!r}",
            )
        known, end = found, time.monotonic() + LOOK_S if changed else end
    nodes.undrain(name)  # that was said of the machine before it ended
    return _Answer()


def _asked(ask: Callable[[], _Answer]) -> _Answer:
    """What a process of its own finds out. Raises Invalid, Unavailable."""
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, msgspec.json.encode(_answer(ask)))
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


def _answer(ask: Callable[[], _Answer]) -> _Answer:
    try:
        return ask()
    except BrokerError as error:
        return _Answer(code=error.code.value, message=error.message)
    except OSError as error:
        return _Answer(code=ErrorCode.STORAGE_FAILED.value, message=f"{error.strerror} file={error.filename}")
