"""Clients that use transactional ids, one after the other or in conflict.

A committed transaction is visible completely, an open one not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from polywire.broker.topics import Partition
from polywire.broker.transaction_state import Scope, Transaction
from polywire.errors import BrokerError, ErrorCode
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.sim.broker.asking import Asking
from tests.sim.broker.group_part import GROUPS, OFFSETS
from tests.sim.broker.history import Key
from tests.sim.broker.model import Held, Holder, StagedRecords
from tests.sim.broker.part import Part
from tests.sim.chance import Chance
from tests.sim.promises import require

TIMEOUT_S: Final = 3.0


class TransactionPart(Part):
    """A base of ``Client``."""

    def __init__(self, asking: Asking, chance: Chance) -> None:
        super().__init__(asking, chance)
        asking.watch_unasked("transaction", self._ended_by_itself)

    def _ended_by_itself(self, key: Key, before: object, after: object) -> None:
        """Check a transaction that aborted without a request: its timeout must have passed."""
        id_ = str(key[2])
        aborted = (
            isinstance(before, tuple) and isinstance(after, tuple) and (before[1], after[1]) == ("OPEN", "ABORTED")
        )
        require(aborted, "a transaction ends by itself in one way", id=id_, was=before, now=after)
        began_at = self.model.ids[id_].began_at
        over = self.broker.clock.monotonic() - began_at >= TIMEOUT_S - 1e-6  # the broker counts whole microseconds
        require(over, "a transaction has its time", id=id_, began_at=began_at)

    def _held(self, holder: Holder) -> Transaction | None:
        """Return the transaction of the current holder of an id, None for a former one."""
        try:
            found = self.broker.transactions.find(holder.id)
        except BrokerError as error:
            require(self.asking.is_excused(error), "refused for no reason", error=str(error))
            return None
        return found if found is not None and found.epoch == holder.epoch else None

    def _open(self) -> tuple[Holder, Transaction] | None:
        holder = self.chance.one_of(self.model.holders)
        found = self._held(holder)
        if found is None or not found.is_open:
            return None
        require(holder.held.begun, "a transaction that was not synced ends with the process", id=holder.id)
        return holder, found

    def hold(self) -> None:
        """Take over an id; the former holder is fenced."""
        holder, transactions = self.chance.one_of(self.model.holders), self.broker.transactions
        self.asking.notice()  # the earlier transaction may have expired
        before = self.model.history.latest.get(("transaction", "", holder.id))
        epoch = before[0] + 1 if isinstance(before, tuple) else 0
        level = self.level() if holder.numbered else Level.SYNCED
        if holder.numbered:
            us = int(TIMEOUT_S * 1_000_000)
            verb = partial(transactions.number_producer, holder.id, asks_again=False, timeout_us=us, level=level)
        else:
            verb = partial(transactions.begin_epoch, holder.id)
        state = "EMPTY" if holder.numbered else "ABORTED"
        found = self.ask(
            "hold",
            holder.id,
            lambda done: verb(done=done),
            level=level,
            applied=lambda _: {("transaction", "", holder.id): (epoch, state)},
            free=("holds",),
        )
        if found is not None:
            holder.begin_epoch(found.epoch, synced=level is Level.SYNCED)

    def begin(self) -> None:
        holder = self.chance.one_of(self.model.holders)
        found, partition = self._held(holder), self.partition()
        if found is None or found.is_open or partition is None:
            return
        level, transactions = self._level(holder), self.broker.transactions
        verb: Callable[..., object] = partial(transactions.begin, found, level=level)
        if holder.numbered:
            verb = partial(transactions.add_partitions, found, [partition], level=level)

        def applied(_: object) -> Mapping[Key, object]:
            began_at = self.broker.clock.monotonic() if holder.numbered else math.inf
            holder.held.begun.append((self.model.history.moment + 1, began_at))
            return {("transaction", "", holder.id): (holder.epoch, "OPEN")}

        text = f"{holder.id} epoch={holder.epoch}"
        self.ask("begin", text, lambda done: verb(done=done), level=level, applied=applied, free=("holds",))

    @staticmethod
    def _level(holder: Holder) -> Level:
        return Level.SYNCED if holder.synced else Level.WRITTEN

    def stage_in_transaction(self) -> None:
        """Stage an invisible record, or repeat the last one, which changes nothing."""
        opened, partition = self._open(), self.partition()
        if opened is None or partition is None:
            return
        holder, found = opened
        own = self.model.staged_by(holder, found.token, partition.incarnation)
        if own and own[-1].token == found.token and self.chance.happens(0.2):
            self._stage(holder, found, partition, own[-1], again=True)
            return
        first = own[-1].last + 1 if own else int(not holder.numbered)
        contents = self.contents(partition.topic.settings.compaction)
        identity = (holder.id, holder.epoch, found.token, partition.incarnation)
        staged = StagedRecords(0, *identity, first, first + len(contents) - 1, contents)
        self._stage(holder, found, partition, staged, again=False)

    def _stage(
        self, holder: Holder, found: Transaction, partition: Partition, staged: StagedRecords, *, again: bool
    ) -> None:
        batch = from_records([Record(value, key) for key, value in staged.contents])
        level, first, last = self._level(holder), staged.first, staged.last
        verb = partial(self.broker.transactions.stage, found, partition, batch, first=first, last=last, level=level)
        text = f"{holder.id} epoch={holder.epoch} sequence={first} p{partition.incarnation}"

        def applied(stored: bool) -> Mapping[Key, object]:
            require(stored is not again, "what was staged before is staged once", staged=stored, again=again)
            if not again:
                staged.moment = self.model.history.moment + 1
                self.model.staged.append(staged)
            return {}

        def completed(_: int) -> None:
            staged.is_answered = True

        ask = partial(self.ask, "hold back", text, lambda done: verb(done=done), level=level, free=("holds",))
        ask(applied=applied, completed=completed)

    def put_offsets(self) -> None:
        opened, topic = self._open(), self.topic()
        if opened is None or topic is None:
            return
        holder, found = opened
        group, name, level = self.chance.one_of(GROUPS), topic.name.full, self._level(holder)
        offsets = {number: self.chance.below(OFFSETS) for number in range(len(topic.partitions))}
        verb = partial(self.broker.transactions.put_offsets, found, Scope(name, group), offsets, level=level)

        def applied(_: None) -> Mapping[Key, object]:
            self.model.held.append(Held(self.model.history.moment + 1, found.token, name, group, offsets))
            return {}

        text = f"{holder.id} {group}/{name} {offsets}"
        self.ask("hold offsets", text, lambda done: verb(done=done), level=level, applied=applied, free=("holds",))

    def commit_transaction(self) -> None:
        """Commit: afterwards all of it is visible."""
        opened = self._open()
        if opened is None:
            return
        holder, found = opened
        living = {partition.incarnation: partition for topic in self.broker.topics() for partition in topic.partitions}
        staged = [one for one in self.model.staged if one.token == found.token]
        lost = [one for one in staged if one.incarnation not in living]
        held = [one for one in self.model.held if one.token == found.token]
        if holder.numbered:
            held = [one for one in held if self.broker.find_topic(one.topic) is not None]
            staged = [one for one in staged if one.incarnation in living]
            lost = []

        def applied(_: object) -> Mapping[Key, object]:
            changed: dict[Key, object] = {("transaction", "", holder.id): (holder.epoch, "COMMITTED")}
            for one in staged:
                changed.update(self.append(living[one.incarnation], one.contents))
            for put in held:
                for number, offset in put.offsets.items():
                    changed["position", put.topic, put.group, number] = offset
            return changed

        level = self._level(holder)
        outcome = self.asking.ask(
            "conclude",
            f"{holder.id} epoch={holder.epoch} batches={len(staged)} positions={len(held)} {level.name}",
            lambda done: self.broker.transactions.commit(found, level=level, done=done),
            level=level,
            applied=applied,
            free=("holds",),
        )
        if isinstance(outcome, BrokerError):
            missing = outcome.code is ErrorCode.PARTITION_MISSING and lost
            require(missing or self.asking.is_excused(outcome), "refused for no reason", error=str(outcome))
        else:
            torn = found.token in self.model.torn
            require(not lost and not torn, "a transaction is committed as a whole", lost=lost, torn=torn)

    def abort_transaction(self) -> None:
        opened = self._open()
        if opened is None:
            return
        holder, found = opened
        level = self._level(holder)
        self.ask(
            "abort",
            f"{holder.id} epoch={holder.epoch}",
            lambda done: self.broker.transactions.abort(found, level=level, done=done),
            level=level,
            applied=lambda _: {("transaction", "", holder.id): (holder.epoch, "ABORTED")},
            free=("holds",),
        )
