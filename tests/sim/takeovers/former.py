"""A former leader, which still runs after another machine took over, and its clients, which do not know yet.

It acknowledges nothing that the next leader has not recovered.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, Final

from polywire.broker.groups.share import Batch
from polywire.errors import BrokerError
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level, Outcome
from tests.sim.broker.client import Client
from tests.sim.chance import Chance
from tests.sim.files import Killed
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.takeovers.process import TakeoversProcess

LEAVES: Final = 0.05  # share of the steps of a leader that knows that it is deposed
CLOSES: Final = 0.5  # of their ends; the others are kills
ACTING: Final = 0.3  # share of steps for clients


class Former:
    """Guards: ``is_over`` when its process has ended. wakes_at: until when it is paused."""

    def __init__(self, process: TakeoversProcess, client: Client, chance: Chance, story: Story) -> None:
        self.process: Final = process
        self.client: Final = client
        self.is_over = False
        self.wakes_at = 0.0
        self._chance: Final = chance
        self._story: Final = story
        self._number = 0

    def step(self) -> None:
        """Run a step of its process or of its clients, unless it is paused."""
        process, chance = self.process, self._chance
        if process.loop.clock.monotonic() < self.wakes_at:
            return
        before, self._story.actor = self._story.actor, f"former{process.machine}"
        process.loop.wake()
        try:
            if self.client.asking.failure is not None and chance.happens(LEAVES):
                self.end()
            elif chance.happens(ACTING):
                self._act()
            else:
                process.loop.step()
        except Killed:
            self._leave()
        self._story.actor = before

    def end(self) -> None:
        """End its process: as a leader that resigns, or by a kill."""
        if self.is_over:
            return
        if self._chance.happens(CLOSES):
            self._story.tell("resigned", f"m{self.process.machine}")
            with suppress(BrokerError, Killed):
                self.process.close()
        self._leave()

    def _leave(self) -> None:
        self.process.files.faults.dead = True
        self.process.files.disk.close_all()
        self.is_over = True

    # Clients

    def _act(self) -> None:
        act = self._chance.one_of((self._produce, self._take, self._take, self._acknowledge, self._acknowledge))
        self._story.tell("stale", act.__name__)
        with suppress(BrokerError):
            act()
            self.process.broker.commit()

    def _judge(self, what: str, found: Any) -> None:
        require(isinstance(found, BrokerError), "a former leader acknowledges nothing", what=what)

    def _produce(self) -> None:
        partition = self.client.partition()
        if partition is not None:
            self._number += 1
            batch = from_records([Record(b"stale %d" % self._number, b"stale")])
            done = partial(self._judge, f"produce p{partition.incarnation}")
            self.process.broker.produce(partition, batch, level=Level.WRITTEN, done=done)

    def _take(self) -> None:
        topic, connections = self.client.topic(), self.client.connections
        if topic is not None and connections:
            connection = self._chance.one_of(connections)
            connection.requests = [request for request in connection.requests if request.is_open]
            if not connection.requests:
                self.client._take(connection, topic, 4, 0.0, 0)

    def _acknowledge(self) -> None:
        living = self.client._living()
        known = [
            (key, at, hold.member)
            for key, holds in self.client._holds.items()
            for at, hold in holds.items()
            if hold.is_received and key[1] in living
        ]
        if not known:
            return
        (group, incarnation), at, member = self._chance.one_of(known)
        outcome = self._chance.one_of((Outcome.ACCEPT, Outcome.REJECT))
        done = partial(self._judge, f"{outcome.name} {group} p{incarnation} {at}")
        batch = Batch(at, at, (int(outcome),))
        self.process.broker.shares.acknowledge(group, living[incarnation], member, [batch], done=done)
