"""The mechanisms behind each promise of the broker, with a switch that disables one in the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest

from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.offsets import Positions
from polywire.broker.producers import Producers
from polywire.broker.record_verbs import Admission
from polywire.broker.staging import StagedPublish
from polywire.broker.state import State, WriteBatchVerbs
from polywire.broker.transaction_state import TransactionTable
from polywire.broker.transactions import Transactions
from polywire.broker.view import Views
from polywire.clock import ElapsedClock
from polywire.errors import Conflict, Invalid
from polywire.log.log import FileLog
from polywire.types import Level
from tests.sim.mutation import Mutation, nothing, prepared, replaced, wrapped
from tests.unit.log import test_log

BrokerMutation: Final = partial(Mutation, world="broker")


def _never_repeats(old: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Treat every later request as new."""
    old(*args, **named)


def _without(error: type[Exception]) -> Callable[..., Any]:
    """Accept what would be refused with this error."""

    def around(old: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with suppress(error):
            return old(*args, **named)
        return None

    return around


def _acknowledged_at_once(admission: Admission, repeated: Any, base: int, level: Level, done: Any) -> None:
    """Acknowledge a duplicate although the original is not stored yet."""
    if done is not None:
        admission._log.barrier(Level.MEMORY, lambda _: done(repeated.offset_of(base)))


def any_generation(old: Callable[..., Any], *args: Any, **named: Any) -> Any:
    group, topic, member, _ = args[1:]
    return old(args[0], group, topic, member, None, **named)


class _WallClock:
    """Seconds by the wall clock."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def now_us(self) -> Any:
        return self._clock.now_us()

    def monotonic(self) -> Any:
        return self._clock.now_us() / 1e6


def _seen_by_the_wall(patch: pytest.MonkeyPatch) -> None:
    """Record the last heartbeats of members by the wall clock."""
    begin = Coordinator.__init__

    def begun(self: Coordinator, host: Any, state: Any, settings: Any, clock: Any, elapsed: Any) -> None:
        begin(self, host, state, settings, _WallClock(clock), elapsed)

    patch.setattr(Coordinator, "__init__", begun)


def any_partition(old: Callable[..., Any], self: Coordinator, *args: Any, **named: Any) -> None:
    """Let a member commit offsets of other members' partitions."""
    old(self, *args[:4], (), **named)


def _not_left_open(patch: pytest.MonkeyPatch) -> None:
    """Let a transaction with unsynced parts continue after a start."""
    begin = Transactions.__init__

    def begun(self: Transactions, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        self._left_open.clear()

    patch.setattr(Transactions, "__init__", begun)


def _answered_in_memory(old: Callable[..., None], self: Any, made: Any, *, level: Level, done: Any) -> None:
    old(self, made, level=Level.MEMORY, done=done)


def _alone(patch: pytest.MonkeyPatch) -> None:
    """Store offsets of a transaction in a separate group, before its records."""
    publish = Transactions._publish

    def published(self: Transactions, transaction: Any, staged: Any, *, by: Any, **rest: Any) -> None:
        from polywire.broker import changes

        for stored in list(self._positions(transaction, by)):
            self._log.change(changes.encode(stored), level=Level.MEMORY, done=None)
            self._state.apply_change(stored)
        self._log.write()
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Transactions, "_positions", lambda *_: iter(()))
            publish(self, transaction, staged, by=by, **rest)

    patch.setattr(Transactions, "_publish", published)


BROKER_MUTATIONS: Final[Sequence[Mutation]] = (
    # Producers
    BrokerMutation("producer-repeats", "a repeat is not stored again", wrapped(Producers, "find", _never_repeats)),
    BrokerMutation("producer-epochs", "an old epoch is refused", wrapped(Producers, "find", _without(Conflict))),
    BrokerMutation("producer-gaps", "a gap of sequences is refused", wrapped(Producers, "find", _without(Invalid))),
    BrokerMutation("producer-replay", "a start takes in batches of producers", replaced(State, "replayed", nothing)),
    BrokerMutation("producer-snapshot", "producers are in snapshots", replaced(Producers, "restore", nothing)),
    BrokerMutation(
        "repeat-waits",
        "a repeat waits for the original",
        replaced(Admission, "_complete_repeat", _acknowledged_at_once),
        first=15,
    ),
    # Groups
    BrokerMutation(
        "generation", "a generation that is over is refused", wrapped(Coordinator, "_check", any_generation)
    ),
    BrokerMutation("ownership", "a member stores what is its own", wrapped(Coordinator, "check_member", any_partition)),
    BrokerMutation("silence", "who is silent is put out", replaced(Coordinator, "_expired", lambda *_: [])),
    BrokerMutation("member-clock", "members are timed by the monotonic clock", _seen_by_the_wall),
    # Transactions and publishes
    BrokerMutation(
        "held-positions",
        "positions are stored with their transaction",
        replaced(Transactions, "_positions", lambda *_: iter(())),
    ),
    BrokerMutation("one-group", "positions and records are one group", _alone),
    BrokerMutation(
        "elapsed-clock",
        "what expires does by time that passed",
        replaced(ElapsedClock, "now_us", lambda clock: clock._clock.now_us()),
    ),
    BrokerMutation("left-open", "a transaction that was not synced ends with the process", _not_left_open),
    BrokerMutation(
        "publish-once", "a number is published once", replaced(StagedPublish, "_is_published", lambda *_: False)
    ),
    # State
    BrokerMutation(
        "reserve",
        "what belongs together is one group",
        replaced(FileLog, "reserve", nothing),
        test=prepared(test_log.test_reserve_puts_several_appends_into_one_group),
    ),
    BrokerMutation(
        "answers", "a change is answered at its level", wrapped(WriteBatchVerbs, "change_all", _answered_in_memory)
    ),
    BrokerMutation("views", "a snapshot is of one moment", replaced(Views, "changing", nothing)),
    BrokerMutation(
        "transaction-snapshot", "transactions are in snapshots", replaced(TransactionTable, "restore", nothing)
    ),
    BrokerMutation(
        "shown-positions",
        "clients see committed offsets that no stop takes back",
        wrapped(Positions, "committed", lambda old, *args, latest=False: old(*args, latest=True)),
    ),
    BrokerMutation("topic-positions", "positions end with their topic", replaced(Positions, "drop_topic", nothing)),
)
