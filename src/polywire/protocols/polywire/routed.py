"""Sessions of a broker with several processes (spec: polywire#several-processes, decision 0130).

Records are produced and fetched through ``routing.RoutedBroker``. Other requests are forwarded unchanged to the process
that owns their topic. Lists are combined from all processes.
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
from polywire.protocols.polywire.combining import CombinedResponse, combined_response
from polywire.protocols.polywire.context import PolywireBroker
from polywire.protocols.polywire.messages import Failure, Head, Verb
from polywire.protocols.polywire.session import Command, Handler, PolywireSession
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Router

LOCAL_VERBS: Final = frozenset({Verb.PING, Verb.LOGIN, Verb.CANCEL, Verb.FETCH})
FORWARDED_BYTES_MIN: Final = 8 * 1024  # batches of at least this size are forwarded; the router merges smaller ones


class RoutedPolywireBroker(Topics, Records, WireBroker, Router, Protocol):
    pass


class RoutedSession(PolywireSession):
    """The session of one client that forwards requests to the processes that own the topics."""

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
        """Execute a request in the process that owns its topic, or in all processes.

        Raises BrokerError if this process rejects it.
        """
        verb = self._prefix.verb
        combined = combined_response(self.router.shards, verb, request)
        if combined is not None:
            self.hold()
            _SeveralShards(self, verb, correlation, combined).send_next()
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
        """Send a request to a shard. ``then`` is called with the frame of the response."""
        self.router.forward(shard, self.admission.caller, frame, then, sees_files=self.admission.sees_files())

    def _shard_of(self, request: Any) -> int:
        """Return the shard that executes a request.

        If the topic does not exist, it is this shard, which reports the error.
        """
        shards = self.router.shards
        if isinstance(request, messages.CreateTopic):
            shard = shards.shard_of(created_name(request).full)
            return shards.least_loaded() if shard is None else shard
        name = getattr(request, "name", None)  # BOUNDS has none: its topics are all in this process
        topic = None if name is None else self.broker.find_topic(name)
        return shards.own if topic is None else self.router.shard_of_topic(topic)

    def produce(self, correlation: int, request: messages.Produce, payload: memoryview, /) -> None:
        """PRODUCE: forward large batches to the process that owns the topic, which validates them.

        Raises BrokerError.
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
            self.add_frame(frame)
        self.end_request(holds=holds)

    def add_frame(self, frame: bytes) -> None:
        self._frames.append(frame)

    def end_request(self, *, holds: bool) -> None:
        """Count a response as sent. ``holds``: whether the request has delayed the session's later requests."""
        if holds:
            self.release()
        self._count_response()


def routed(commands: Mapping[int, Command]) -> Mapping[int, Command]:
    """Return the commands of a ``RoutedSession``, most of which forward the request."""
    forward, produce_handler = cast(Handler, RoutedSession.forward), cast(Handler, RoutedSession.produce)
    changed = {
        verb: command if verb in LOCAL_VERBS else replace(command, handler=forward)
        for verb, command in commands.items()
    }
    return changed | {Verb.PRODUCE: replace(commands[Verb.PRODUCE], handler=produce_handler)}


class _SeveralShards:
    """A request that several shards execute, one after the other.

    The session's later requests wait until all shards have executed it.
    """

    __slots__ = ("_combined", "_correlation", "_session", "_verb")

    def __init__(self, session: RoutedSession, verb: int, correlation: int, combined: CombinedResponse) -> None:
        self._session: Final = session
        self._verb: Final = verb
        self._correlation: Final = correlation
        self._combined: Final = combined

    def send_next(self) -> None:
        """Send the request to the next shard. After the last one, send the combined response."""
        shard_request = self._combined.next_request()
        if shard_request is not None:
            shard, head = shard_request
            self._session.send_to(shard, encode_head(self._verb, self._correlation, head), self._answered)
            return
        self._respond(self._combined.result())

    def _respond(self, head: Head) -> None:
        flags = ERROR if isinstance(head, Failure) else 0
        self._session.add_frame(encode_head(self._verb, self._correlation, head, flags=flags))
        self._session.end_request(holds=True)

    def _answered(self, frame: bytes | BrokerError) -> None:
        if isinstance(frame, BrokerError):
            self._session.refuse(self._verb, self._correlation, frame)
            self._session.end_request(holds=True)
            return
        prefix = decode_answer_prefix(frame)
        head = frame[PREFIX_BYTES : PREFIX_BYTES + prefix.head_bytes]
        if prefix.flags & ERROR:
            self._combined.add_failure(decode_answer(head, Failure))
        else:
            self._combined.add(head)
        self.send_next()
