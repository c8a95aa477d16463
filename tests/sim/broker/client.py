"""All clients of a broker.

Every response is checked against the model that all clients share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from tests.sim.broker.group_part import GroupPart
from tests.sim.broker.publish_part import PublishPart
from tests.sim.broker.queue_part import QueuePart
from tests.sim.broker.topic_part import TopicPart
from tests.sim.broker.transaction_part import TransactionPart
from tests.sim.promises import require


class Client(TopicPart, QueuePart, GroupPart, TransactionPart, PublishPart):
    """Its requests are those of its base classes, one for each kind of client."""

    def act(
        self, acts: Sequence[Callable[[Client], None]], weights: Sequence[float], without: Collection[str] = ()
    ) -> None:
        """Make one of these requests, unless it is excluded."""
        story = self.asking.story
        before, story.actor = story.actor, "client"
        chosen = self.chance.weighted(acts, weights)
        if chosen.__name__ not in without:
            chosen(self)
        story.actor = before

    def commit(self) -> None:
        """Commit as at the end of a pass of the loop: all requests are written."""
        self.asking.story.tell("commit")
        self.broker.commit()

    def check_rest(self) -> None:
        """Check that nothing is outstanding."""
        require(not self.asking.unanswered, "every request is answered once", unanswered=self.asking.unanswered)
        require(not self.reading, "every read is answered", reading=self.reading)


ACTS: Final[Mapping[Callable[[Client], None], float]] = {
    Client.create: 1,
    Client.grow: 0.3,
    Client.delete: 0.3,
    Client.purge: 0.4,
    Client.trim: 0.6,
    Client.produce: 10,
    Client.produce_again: 4,
    Client.produce_plainly: 3,
    Client.begin_epoch: 0.3,
    Client.join: 3,
    Client.heartbeat: 4,
    Client.commit_position: 4,
    Client.commit_plainly: 0.5,
    Client.leave: 0.7,
    Client.delete_group: 0.2,
    Client.hold: 0.4,
    Client.begin: 2,
    Client.stage_in_transaction: 5,
    Client.put_offsets: 1.5,
    Client.commit_transaction: 1.5,
    Client.abort_transaction: 0.4,
    Client.stage: 2,
    Client.publish: 1,
    Client.publish_again: 0.5,
    Client.read: 4,
    Client.commit: 6,
}
"""The requests and their weights."""
QUEUE_ACTS: Final[Mapping[Callable[[Client], None], float]] = {
    Client.configure_queue: 2,
    Client.open_letters: 1,
    Client.lose_letters: 0.3,
    Client.schedule: 6,
    Client.connect: 2,
    Client.disconnect: 1,
    Client.vanish: 0.5,
    Client.take: 12,
    Client.acknowledge: 12,
    Client.reset_queue: 0.7,
}
"""Those of share groups, in some runs."""
