"""The common part of all kinds of clients: how they make requests and choose topics.

Only a full or failed disk is allowed to cause a refusal of these requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.types import Level
from tests.sim.broker.asking import Asking
from tests.sim.broker.history import Key
from tests.sim.broker.queue_model import LETTERS
from tests.sim.chance import Chance
from tests.sim.log.client import KEYS, VALUE_SIZES
from tests.sim.log.model import Content
from tests.sim.promises import require

LEVELS: Final = (
    (Level.MEMORY, Level.WRITTEN, Level.WRITTEN, Level.SYNCED),
    (Level.WRITTEN,),
    (Level.SYNCED,),
)
"""The levels of requests by mood."""


class Part:
    """A base of ``Client``. Guards: the outstanding requests to one process."""

    def __init__(self, asking: Asking, chance: Chance) -> None:
        self.asking: Final = asking
        self.broker: Final = asking.broker
        self.model: Final = asking.model
        self.chance: Final = chance
        self.levels: Sequence[Level] = LEVELS[0]

    def level(self) -> Level:
        """Return a level of the current mood."""
        return self.chance.one_of(self.levels)

    def ask(self, event: str, text: str, verb: Callable[[Completion[Any]], Any], *, level: Level, **named: Any) -> Any:
        """Make a request that only a full or failed disk may refuse; return its result, None if it was refused."""
        found = self.asking.ask(event, f"{text} {level.name}", verb, level=level, **named)
        if isinstance(found, BrokerError):
            require(self.asking.is_excused(found), "refused for no reason", what=event, error=str(found))
            return None
        return found

    def topics(self) -> list[Topic]:
        """Return the existing topics, except the one to which only the broker writes."""
        return [topic for topic in self.broker.topics() if topic.name.full != LETTERS]

    def topic(self) -> Topic | None:
        """Return an existing topic."""
        topics = self.topics()
        return self.chance.one_of(topics) if topics else None

    def partition(self) -> Partition | None:
        """Return an existing partition."""
        topic = self.topic()
        return None if topic is None else self.chance.one_of(topic.partitions)

    def contents(self, keyed: bool) -> list[Content]:
        """Return new records."""
        found: list[Content] = []
        for _ in range(1 + self.chance.below(3)):
            value: bytes | None = b"%d:" % self.model.number() + b"." * self.chance.one_of(VALUE_SIZES)
            key = b"k%d" % self.chance.below(KEYS) if keyed else None
            if keyed and self.chance.happens(0.15):
                value = None
            found.append((key, value))
        return found

    def append(self, partition: Partition, contents: list[Content]) -> dict[Key, object]:
        """Note the new records of a partition; return the changed state."""
        kept = self.model.partitions[partition.incarnation]
        kept.records += contents
        return {("end", partition.topic.name.full, partition.incarnation): len(kept.records)}
