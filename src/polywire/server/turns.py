"""A broker of a bucket, turn by turn: it stands by while another leads, then serves, and stands by again once it is deposed.

Promises: a bucket that does not answer ends only who was of no use yet. Must not know: how anybody leads, any wire.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import structlog

from polywire.cluster.shards import FIRST
from polywire.errors import ErrorCode, NotOwner, Unavailable
from polywire.server import lifecycle
from polywire.server.bucket import is_left_opening
from polywire.server.bucket_watch import BucketWatch
from polywire.server.config import ServeConfig
from polywire.server.lines import LineLimit
from polywire.server.shard import Shard
from polywire.server.signals import Signals
from polywire.server.standby import Presence, Standby, Turn

log = structlog.get_logger("polywire.server")


def serve_in_turns(config: ServeConfig, lines: LineLimit, watch: BucketWatch, shard: Shard | None = None) -> int:
    """Serve until told to stop, however often another broker leads; returns the exit code. shard: this process's, where it is one of
    several. Raises BrokerError when it cannot start."""
    signals, code, deposed = Signals(), lifecycle.EXIT_DEPOSED, False
    if shard is None:
        watch.undrain()  # of several processes their parent has
    while code == lifecycle.EXIT_DEPOSED:
        if deposed:
            watch.deposed()
        serving = partial(serve_in_turn, config, lines, watch, signals, deposed=deposed, shard=shard)
        code, deposed = lifecycle.run_once(serving), True
    if watch.candidate.shard == FIRST:
        watch.undrain()  # the machine ends
    return code


async def serve_in_turn(
    config: ServeConfig,
    lines: LineLimit,
    watch: BucketWatch,
    signals: Signals,
    *,
    deposed: bool,
    shard: Shard | None = None,
) -> int:
    """Stand by while another broker leads the log in the bucket, then serve. Raises BrokerError when it cannot start.

    deposed: another has just begun to.
    """
    presence, standby = Presence(config, watch), Standby(config, watch, signals, deposed=deposed, shard=shard)
    try:
        if not await standby.wait(presence):
            return lifecycle.EXIT_OK
        presence.say({}, -1)
        others = Turn(presence, standby, watch, signals)
        return await _serve(config, lines, others, shard, has_waited=standby.has_waited)
    except NotOwner as error:
        if standby.is_stopping:
            return lifecycle.EXIT_OK
        signals.keep()
        log.info("becoming a standby", reason=error.message)
        return lifecycle.EXIT_DEPOSED
    except asyncio.CancelledError:
        if not standby.is_stopping:
            raise
        log.info("stopped during recovery of the log", exit_code=lifecycle.EXIT_OK)
        return lifecycle.EXIT_OK
    finally:
        await standby.stop()
        await asyncio.to_thread(presence.end)
        if standby.is_stopping and await asyncio.to_thread(is_left_opening):
            os._exit(
                lifecycle.EXIT_OK
            )  # threads that wait for the bucket would hold up the end, and nothing of theirs is kept


async def _serve(
    config: ServeConfig, lines: LineLimit, others: lifecycle.Others, shard: Shard | None, *, has_waited: bool
) -> int:
    """Serve; a bucket that does not answer is no reason to end for who stood by already. Raises BrokerError."""
    try:
        return await lifecycle.serve(config, lines, others, shard)
    except Unavailable as error:
        if not has_waited:
            raise
        raise NotOwner(ErrorCode.NOT_OWNER, error.message) from error
