"""Mechanisms of takeovers over a bucket, with a switch that disables one in the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest
from msgspec import structs

from polywire.broker.groups import delay_index
from polywire.broker.groups.dead_letters import DeadLetters
from polywire.broker.groups.share import SharePartition
from polywire.broker.groups.share_groups import ShareGroups
from polywire.broker.groups.share_table import ShareTable
from polywire.cluster import fencing
from polywire.cluster.fencing import Create, Steps
from polywire.cluster.opening import ShardOpening
from polywire.cluster.uploader import Uploader
from polywire.log.log import FileLog
from tests.sim.mutation import Mutation, nothing, put, replaced, wrapped
from tests.sim.queue_mutations import answered_early, delivered_at_once, gaps_known, never_copied

TakeoversMutation: Final = partial(Mutation, world="takeovers")


def _stored_at_once(old: Callable[..., None], uploader: Uploader, sequence: int, *args: Any) -> None:
    """Report a journal write as stored before its object is."""
    old(uploader, sequence, *args)

    def stored() -> None:
        while uploader._waiting and uploader._waiting[0][0] <= sequence:
            uploader._waiting.popleft()[1](None)

    uploader._loop.call_soon(stored)


def _deposed_unnoticed(old: Callable[..., None], uploader: Uploader, mine: Any) -> None:
    """Continue to lead although another broker has written the object."""
    old(uploader, mine or mine is False)


def _any_object(number: int, content: Any) -> Steps[bool]:
    """Take any existing object for one's own."""
    yield Create(number, content)
    return True


def _shows_unstored(old: Callable[..., FileLog], opening: ShardOpening) -> FileLog:
    """Show records before the bucket has them."""
    assert opening._recovered is not None, "it has recovered"
    opening._recovered.state._hides_unsynced = False  # type: ignore[misc]
    log = old(opening)
    log._writer._hides_unsynced = False
    return log


def _queues_forgotten(old: Callable[..., None], *args: Any) -> None:
    """Replay the journal without the progress of queues."""
    with pytest.MonkeyPatch.context() as patch:
        put(patch, ShareTable, "apply", nothing)
        old(*args)


def _last_forgotten(old: Callable[..., Any], opening: ShardOpening, *args: Any) -> Any:
    """Recover the journal without its last write."""
    chain = old(opening, *args)
    return structs.replace(chain, groups=chain.groups[:-1])


def _unlocked_by_any(old: Callable[..., Any], share: SharePartition, member: str, batches: Any, **named: Any) -> Any:
    """Accept acknowledgements of records that no worker has locked since the takeover."""
    for batch in batches:
        if batch.first in share.progress.counts and batch.first not in share._locks:
            return share.finish(batch.first)
    return old(share, member, batches, **named)


TAKEOVERS_MUTATIONS: Final[Sequence[Mutation]] = (
    TakeoversMutation(
        "bucket-first", "an acknowledgement waits for the bucket", wrapped(Uploader, "wrote", _stored_at_once)
    ),
    TakeoversMutation(
        "deposed", "a leader that lost its number ends", wrapped(Uploader, "_settled", _deposed_unnoticed)
    ),
    TakeoversMutation("own-object", "an object that exists is compared", replaced(fencing, "settle", _any_object)),
    TakeoversMutation(
        "stored-shown", "readers see only what the bucket has", wrapped(ShardOpening, "begin", _shows_unstored)
    ),
    TakeoversMutation(
        "whole-journal", "a leader recovers the whole journal", wrapped(ShardOpening, "_copied", _last_forgotten)
    ),
    TakeoversMutation(
        "queues-taken",
        "a leader recovers the progress of queues",
        wrapped(ShardOpening, "_replay_journal", _queues_forgotten),
    ),
    TakeoversMutation(
        "locks-taken",
        "a lock of an earlier leader permits nothing",
        wrapped(SharePartition, "acknowledge", _unlocked_by_any),
    ),
    TakeoversMutation(
        "acknowledged-stored",
        "an acknowledgement of a record waits for the bucket",
        wrapped(ShareGroups, "_settle", answered_early),
    ),
    TakeoversMutation(
        "delivery-taken", "a delivery is stored before it is sent", wrapped(ShareGroups, "acquire", delivered_at_once)
    ),
    TakeoversMutation(
        "index-rebuilt", "a leader reads delayed records from the log", wrapped(delay_index, "_query", gaps_known)
    ),
    TakeoversMutation("letter-taken", "a leader copies what it rejects", replaced(DeadLetters, "put", never_copied)),
    TakeoversMutation(
        "exhausted-taken",
        "a leader rejects what the one before delivered too often",
        replaced(SharePartition, "exhausted", lambda *_: None),
    ),
)
