"""Clients that stage batches and publish them under their own sequence numbers, and retry until they get a response.

Each sequence number of a writer is published once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from polywire.broker.staging import PublishAnswer
from polywire.errors import BrokerError, ErrorCode
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.sim.broker.history import Key
from tests.sim.broker.model import Token
from tests.sim.broker.part import Part
from tests.sim.promises import require

WRITERS: Final = ("w", "x")


class PublishPart(Part):
    """A base of ``Client``."""

    def _last(self, writer: str) -> int:
        found = self.model.history.latest.get(("writer", "", writer), 0)
        assert isinstance(found, int), "a number"
        return found

    def stage(self) -> None:
        """Stage a batch for the next number of a writer."""
        partition = self.partition()
        if partition is None:
            return
        writer, level, token = self.chance.one_of(WRITERS), self.level(), self.chance.token(16)
        number = self._last(writer) + 1
        contents = self.contents(partition.topic.settings.compaction)
        batch = from_records([Record(value, key) for key, value in contents])
        verb = partial(self.broker.stage, token, partition, batch, write=(writer, number), level=level)
        text = f"{token.hex()[:8]} for {writer} {number} p{partition.incarnation}"

        def applied(_: None) -> Mapping[Key, object]:
            self.model.tokens[token] = Token(writer, number, partition.incarnation, contents)
            return {("staged", "", token.hex()): True}

        self.ask("stage", text, lambda done: verb(done=done), level=level, applied=applied)

    def publish(self) -> None:
        """Publish the next number of a writer with everything staged for it."""
        writer = self.chance.one_of(WRITERS)
        self._publish(writer, self._last(writer) + 1)

    def publish_again(self) -> None:
        """Publish a number that may be published already, with what is staged for it now."""
        writer = self.chance.one_of(WRITERS)
        if self._last(writer):
            self._publish(writer, 1 + self.chance.below(self._last(writer)))

    def _publish(self, writer: str, number: int) -> None:
        repeated = number <= self._last(writer)
        wanted = number if not repeated else self._last(writer) + 1
        tokens = {
            token: known
            for token, known in self.model.tokens.items()
            if not known.is_gone and (known.writer, known.number) == (writer, wanted)
        }
        living = {partition.incarnation: partition for topic in self.broker.topics() for partition in topic.partitions}
        lost = [token for token, known in tokens.items() if known.incarnation not in living]
        answers: list[PublishAnswer] = []

        def applied(_: object) -> Mapping[Key, object]:
            changed: dict[Key, object] = {}
            if not repeated:
                changed["writer", "", writer] = number
                for known in tokens.values():
                    changed.update(self.append(living[known.incarnation], known.contents))
            for token, known in tokens.items():
                known.is_gone, changed["staged", "", token.hex()] = True, None
            return changed

        def completed(answer: PublishAnswer) -> None:
            answers.append(answer)
            require(answer.duplicate is repeated, "a number is published once", writer=writer, number=number)

        found = self.asking.ask(
            "publish",
            f"{writer} {number} tokens={len(tokens)} repeated={repeated}",
            lambda done: self.broker.publish(writer, number, list(tokens), done=done),
            level=Level.SYNCED,
            applied=applied,
            completed=completed,
            moment=0 if repeated else None,
        )
        if isinstance(found, BrokerError):
            missing = found.code in (ErrorCode.PARTITION_MISSING, ErrorCode.STAGE_MISSING) and lost
            require(missing or self.asking.is_excused(found), "refused for no reason", error=str(found), lost=len(lost))
        else:
            require(repeated or not lost, "a publish is there as a whole", lost=len(lost))
