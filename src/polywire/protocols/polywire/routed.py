"""A session of a broker of several processes (spec: polywire#several-processes, decision 0130).

Records are produced and fetched through the router. All other requests are executed, unchanged, in the process that owns
their topic, and lists are combined from all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, cast

from polywire.broker.api import Records, Topics
from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.polywire import messages, produce
from polywire.protocols.polywire.auth import created_name
from polywire.protocols.polywire.codec import (
    ERROR,
    PREFIX_BYTES,
    decode_answer,
    decode_answer_prefix,
    encode_head,
)
from polywire.protocols.polywire.context import PolywireBroker
from polywire.protocols.polywire.gathering import Gathered, gathering
from polywire.protocols.polywire.messages import Failure, Head, Verb
from polywire.protocols.polywire.session import Command, Handler, PolywireSession
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Router

HERE: Final = frozenset({Verb.PING, Verb.LOGIN, Verb.CANCEL, Verb.FETCH})
FORWARDED_BYTES_MIN: Final = 8 * 1024  # of batches that are passed on; smaller ones are merged by the router's session


class RoutedPolywireBroker(Topics, Records, WireBroker, Router, Protocol):
    pass


class RoutedSession(PolywireSession):
    """The session of one client. It uses only those verbs of its broker that the router has."""

    __slots__ = ("router",)

    def __init__(
        self,
        router: RoutedPolywireBroker,
        commands: Mapping[int, Command],
        round_robin: Iterator[int],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(cast(PolywireBroker, router), commands, round_robin, output, resume)
        self.router: Final = router

    def _waits(self) -> bool:
        if super()._waits():
            return True
        if self.router.is_clogged:
            self.router.on_relief(self._continue)
            return True
        return False

    def forward(self, correlation: int, request: Any, payload: memoryview, /) -> None:
        """Execute a request in the process of its topic, or in all processes.

        Raises BrokerError if it is rejected here.
        """
        verb = self._prefix.verb
        gathered = gathering(self.router.shards, verb, request)
        if gathered is not None:
            self.hold()
            _Several(self, verb, correlation, gathered).ask_next()
            return
        # later requests wait for these, because they must see the change
        holds = verb in (Verb.CREATE_TOPIC, Verb.DELETE_TOPIC)
        frame = encode_head(verb, correlation, request, payload_bytes=len(payload)) + payload
        self.send_to(self._shard_of(request), frame, partial(self._answered, verb, correlation, holds=holds))
        if holds:
            self.hold()
        else:
            self.owe()

    def send_to(self, shard: int, frame: bytes, then: Completion[bytes]) -> None:
        self.router.forward(shard, self.admission.caller, frame, then, sees_files=self.admission.sees_files())

    def _shard_of(self, request: Any) -> int:
        """Return the shard that executes a request.

        For a topic that does not exist, return this shard, which then reports the error.
        """
        shards = self.router.shards
        if isinstance(request, messages.CreateTopic):
            shard = shards.shard_of(created_name(request).full)
            return shards.least_loaded() if shard is None else shard
        name = getattr(request, "name", None)  # BOUNDS of topics of this process has none
        topic = None if name is None else self.broker.find_topic(name)
        return shards.own if topic is None else self.router.shard_of_topic(topic)

    def produce(self, correlation: int, request: messages.Produce, payload: memoryview, /) -> None:
        """Handle PRODUCE.

        Large batches for another process are passed on unchanged and checked there. Raises BrokerError.
        """
        topic = self.broker.find_topic(request.name) if len(payload) >= FORWARDED_BYTES_MIN else None
        if topic is None or self.router.shard_of_topic(topic) == self.router.shards.own:
            produce.produce(self, correlation, request, payload)
        else:
            self.forward(correlation, request, payload)

    def _answered(self, verb: int, correlation: int, frame: bytes | BrokerError, *, holds: bool) -> None:
        if isinstance(frame, BrokerError):
            self.refuse(verb, correlation, frame)
        else:
            self.pass_on(frame)
        self.over(holds=holds)

    def pass_on(self, frame: bytes) -> None:
        self._answers.append(frame)

    def over(self, *, holds: bool) -> None:
        if holds:
            self.release()
        self._paid()


def routed(commands: Mapping[int, Command]) -> Mapping[int, Command]:
    """Return the commands of a ``RoutedSession``."""
    forward, produced = cast(Handler, RoutedSession.forward), cast(Handler, RoutedSession.produce)
    own = {verb: command if verb in HERE else replace(command, handler=forward) for verb, command in commands.items()}
    return own | {Verb.PRODUCE: replace(commands[Verb.PRODUCE], handler=produced)}


class _Several:
    """A request to several shards, one after the other, with one combined response. Later requests wait."""

    __slots__ = ("_correlation", "_gathered", "_session", "_verb")

    def __init__(self, session: RoutedSession, verb: int, correlation: int, gathered: Gathered) -> None:
        self._session: Final = session
        self._verb: Final = verb
        self._correlation: Final = correlation
        self._gathered: Final = gathered

    def ask_next(self) -> None:
        """Send the request to the next shard, or respond after the last one."""
        question = self._gathered.next_question()
        if question is not None:
            shard, head = question
            self._session.send_to(shard, encode_head(self._verb, self._correlation, head), self._answered)
            return
        self._respond(self._gathered.whole())

    def _respond(self, head: Head) -> None:
        flags = ERROR if isinstance(head, Failure) else 0
        self._session.pass_on(encode_head(self._verb, self._correlation, head, flags=flags))
        self._session.over(holds=True)

    def _answered(self, frame: bytes | BrokerError) -> None:
        if isinstance(frame, BrokerError):
            self._session.refuse(self._verb, self._correlation, frame)
            self._session.over(holds=True)
            return
        prefix = decode_answer_prefix(frame)
        head = frame[PREFIX_BYTES : PREFIX_BYTES + prefix.head_bytes]
        if prefix.flags & ERROR:
            self._gathered.refused(decode_answer(head, Failure))
        else:
            self._gathered.answered(head)
        self.ask_next()
