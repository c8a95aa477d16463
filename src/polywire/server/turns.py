"""The life of a broker with a bucket, which alternates between standby and leader.

While another broker leads, it is a standby. Then it leads until it is deposed, and becomes a standby again.

An unreachable bucket ends the process only when it starts. A broker that has been a standby waits until the bucket
responds again.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import structlog

from polywire.errors import ErrorCode, NotOwner, Unavailable
from polywire.server import lifecycle
from polywire.server.bucket import is_left_opening
from polywire.server.bucket_watch import BucketWatch
from polywire.server.config import ServeConfig
from polywire.server.lines import LineLimit
from polywire.server.shard import Shard
from polywire.server.signals import Signals
from polywire.server.standby import Presence, Standby, Turn
from polywire.store.objects import FIRST

log = structlog.get_logger("polywire.server")


def serve_in_turns(config: ServeConfig, lines: LineLimit, watch: BucketWatch, shard: Shard | None = None) -> int:
    """Serve until a signal stops the process, as leader or standby, and return the exit code.

    ``shard`` is the shard of this process if there are several. Raises BrokerError if the process cannot start.
    """
    signals, code, deposed = Signals(), lifecycle.EXIT_DEPOSED, False
    if shard is None:
        watch.undrain()  # if there are several processes, their parent has done this
    while code == lifecycle.EXIT_DEPOSED:
        if deposed:
            watch.deposed()
        serving = partial(serve_in_turn, config, lines, watch, signals, deposed=deposed, shard=shard)
        code, deposed = lifecycle.run_once(serving), True
    if watch.candidate.shard == FIRST:
        watch.undrain()  # a drain ends with the broker that it stopped
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
    """Wait as a standby while another broker leads the log, then lead it, and return the exit code.

    ``deposed`` says whether this process has just lost leadership. Raises BrokerError if it cannot start.
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
            # A normal exit would wait for threads that are blocked in requests to the bucket. Their results are not
            # needed any more.
            os._exit(lifecycle.EXIT_OK)


async def _serve(
    config: ServeConfig, lines: LineLimit, others: lifecycle.OtherBrokers, shard: Shard | None, *, has_waited: bool
) -> int:
    """Serve as the leader. Raises BrokerError.

    If the bucket is unreachable and this broker has been a standby, raises NotOwner, which makes it a standby again.
    """
    try:
        return await lifecycle.serve(config, lines, others, shard)
    except Unavailable as error:
        if not has_waited:
            raise
        raise NotOwner(ErrorCode.NOT_OWNER, error.message) from error
