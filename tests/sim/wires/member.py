"""A client as a member of a group that clients of several protocols share.

It joins, sends heartbeats, commits and leaves. Its view outlives its connections and processes: it may be a member for
longer than it knows, or act after it was removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.wires.group_ledger import GROUP, TOPIC, GroupLedger, Membership, Move
from tests.sim.wires.ledger import TOPICS
from tests.sim.wires.speech import Answer, Speech


class Ask(Protocol):
    """Sends a client's request and has its answer checked."""

    def __call__(
        self,
        what: str,
        request: Callable[[int], bytes],
        judge: Callable[[Answer], None],
        refused: Callable[[], None],
        /,
    ) -> None: ...


class Member:
    """Guards: ``place`` is its last assignment, None before the first and once it knows that it was removed."""

    def __init__(self, name: str, ledger: GroupLedger, chance: Chance, ask: Ask) -> None:
        self._name: Final = name
        self._ledger = ledger
        self._chance = chance
        self._ask = ask
        self._place: Membership | None = None

    def do(self, act: str, speech: Speech) -> None:
        """Make a request about the group."""
        place = self._place
        if act == "join":
            own = self._name if place is None else place.name
            self._ledger.lets_go(own)
            self._ask("join", lambda number: speech.join(number, own), self._placing(), self._forget)
        elif act == "look":
            self._look(speech)
        elif place is None:
            return
        elif act == "stay":
            self._ledger.lets_go(place.name, place.partitions)
            self._ask("stay", lambda number: speech.stay(number, place), self._placing(), self._forget)
        elif act == "leave":
            self._ledger.lets_go(place.name)
            self._ask("leave", lambda number: speech.leave(number, place), lambda _: self._forget(), self._forget)
        else:
            self._move(speech, place)

    def _placing(self) -> Callable[[Answer], None]:
        """Return the handler of the assignment that is requested now."""
        asked = self._ledger.begins()

        def placed(answer: Answer) -> None:
            place = answer.place
            require(place is not None, "a join or heartbeat returns an assignment", member=self._name)
            assert place is not None, "it was looked at"
            self._ledger.placed(place, asked)
            self._place = place

        return placed

    def _forget(self) -> None:
        self._place = None

    def _move(self, speech: Speech, place: Membership) -> None:
        """Commit a position, mostly of its own partition and never backwards, as some protocols require."""
        partition = self._chance.below(TOPICS[TOPIC])
        if place.partitions and self._chance.happens(0.8):
            partition = self._chance.one_of(place.partitions)
        move = self._ledger.asks(partition, self._ledger.furthest(partition) + 1 + self._chance.below(20))
        self._ask(
            f"move {TOPIC}/{partition} {move.offset} generation={place.generation}",
            lambda number: speech.move(number, place, partition, move.offset),
            lambda _: self._ledger.moved(place, move),
            lambda: self._not_moved(move),
        )

    def _not_moved(self, move: Move) -> None:
        self._ledger.refused(move)
        if self._chance.happens(0.5):  # otherwise it retries with its old assignment
            self._place = None

    def _look(self, speech: Speech) -> None:
        partition, asked_at = self._chance.below(TOPICS[TOPIC]), self._ledger.tick()
        self._ask(
            f"look {TOPIC}/{partition}",
            lambda number: speech.position(number, GROUP, (TOPIC, partition)),
            lambda answer: self._ledger.finds(partition, answer.offset, asked_at),
            lambda: None,
        )
