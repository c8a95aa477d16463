"""Forward requests to the shards that own their topics, frame by frame (spec: polywire#several-processes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from polywire.errors import BrokerError, Denied, ErrorCode, Invalid, PeerError, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.auth import created_name
from polywire.protocols.polywire.codec import (
    ERROR,
    MORE,
    PREFIX_BYTES,
    Prefix,
    decode_answer,
    decode_request,
    encode_head,
)
from polywire.protocols.polywire.context import PolywireBroker
from polywire.protocols.polywire.gathering import Gathered, gathering
from polywire.protocols.polywire.messages import Failure, Head, Verb
from polywire.protocols.polywire.session import Command, PolywireSession
from polywire.protocols.polywire.shard_link import ShardLink
from polywire.protocols.runtime import carrying
from polywire.protocols.runtime.links import Links
from polywire.protocols.runtime.sequential import Wait
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Shards

OWN: Final = frozenset({Verb.PING, Verb.LOGIN})
LOST: Final = "the process of this topic has ended and is being restarted: the outcome of the request is unknown"


class Carried(Protocol):
    """A forwarded request."""

    def answered(self, prefix: Prefix, frame: bytes) -> None:
        """Handle a response frame of the shard."""

    def failed(self, error: BrokerError) -> None:
        """Handle the error that the shard does not respond any more."""


class CarryingSession(carrying.CarryingSession, PolywireSession):
    """The session of one client. ``_carried`` has the unanswered forwarded requests, by shard and correlation id."""

    __slots__ = ("_carried", "_links", "_login", "shards")

    def __init__(
        self,
        shards: Shards,
        broker: PolywireBroker,
        commands: Mapping[int, Command],
        round_robin: Iterator[int],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(broker, commands, round_robin, output, resume)
        self.shards: Final = shards
        self._carried: dict[tuple[int, int], Carried] = {}
        self._links: Final = Links(self._linked)
        self._login = b""

    def _run_bytes(self, data: memoryview, at: int) -> int:
        """Return the size of a run of frames, as in the base class, but only if the run is for this shard."""
        body = at + PREFIX_BYTES
        try:
            request = decode_request(self._prefix.verb, data[body : body + self._prefix.head_bytes])
        except PeerError:
            return 0
        is_here = self.broker.find_topic(getattr(request, "name", "")) is not None
        return super()._run_bytes(data, at) if is_here else 0

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        prefix, body = self._prefix, at + PREFIX_BYTES
        if prefix.verb == Verb.LOGIN:
            self._replace_links(bytes(data[at:end]))
        if prefix.verb in OWN or not self._is_known():
            return super()._take(data, at, end)
        try:
            request = decode_request(prefix.verb, data[body : body + prefix.head_bytes])
            shard = self._place(prefix, request, data[at:end])
        except PeerError:
            shard = self.shards.own  # this shard reports the error
        except BrokerError as error:
            self.refuse(prefix.verb, prefix.correlation, error)
            return True
        if shard == self.shards.own:
            return super()._take(data, at, end)
        return True

    def _is_known(self) -> bool:
        """Return whether this client's requests may be forwarded."""
        return self.broker.access.is_open or self.admission.principal is not None

    def _place(self, prefix: Prefix, request: Head, frame: memoryview) -> int | None:
        """Forward a request, or return this shard if the request is for it. Raises Invalid, Missing."""
        own, name = self.shards.own, getattr(request, "name", None)
        if isinstance(request, messages.Cancel):
            return self._cancel(prefix, request, bytes(frame))
        gathered = gathering(self.shards, prefix.verb, request)
        if gathered is not None:
            self.hold()
            _Several(self, prefix, gathered).ask_next()
            return None
        if not isinstance(name, str):
            return own
        if isinstance(request, messages.CreateTopic):
            name = created_name(request).full
        shard = own if self.broker.find_topic(name) is not None else self.shards.shard_of(name)
        is_new = shard is None
        if shard is None:
            shard = self._begins(request, name)
        if shard == own:
            return own
        holds = is_new or prefix.verb == Verb.DELETE_TOPIC  # later requests wait, because they must see the change
        self.carry(shard, prefix.correlation, bytes(frame), _One(self, prefix, holds=holds))
        if holds:
            self.hold()
        else:
            self.owe()
        return None

    def _begins(self, request: Head, name: str) -> int:
        """Return the shard for a topic that does not exist.

        If the request cannot create it, this shard reports the error.
        """
        if isinstance(request, messages.CreateTopic):
            return self.shards.least_loaded()
        if isinstance(request, messages.Produce) and request.create:
            return self.shards.home(name)
        return self.shards.own

    def _cancel(self, prefix: Prefix, request: messages.Cancel, frame: bytes) -> int | None:
        for shard, correlation in self._carried:
            if correlation == request.correlation:
                self.carry(shard, prefix.correlation, frame, _One(self, prefix, holds=False))
                self.owe()
                return None
        return self.shards.own

    def carry(self, shard: int, correlation: int, frame: bytes, carried: Carried) -> None:
        """Send a request to a shard. Raises Invalid."""
        if correlation == 0 or (shard, correlation) in self._carried:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"correlation id is in use correlation={correlation}")
        self._carried[shard, correlation] = carried
        self._links.to(shard).write(frame)

    def _linked(self, shard: int) -> ShardLink:
        return ShardLink(self.shards, shard, self, self._login)

    def pass_on(self, frame: bytes) -> None:
        """Send a response frame of another shard to the client."""
        self._answers.append(frame)

    def over(self, *, holds: bool) -> None:
        """Count a forwarded request as answered."""
        if holds:
            self._reasons &= ~Wait.HOLDING
        self._paid()

    # Called by links

    def frames_came(self, shard: int, frames: Sequence[tuple[Prefix, bytes]]) -> None:
        """Handle response frames of a shard.

        The results are sent with one write. Pause shards while the client does not read.
        """
        self._busy = True
        try:
            for prefix, frame in frames:
                place = shard, prefix.correlation
                carried = self._carried.get(place) if prefix.flags & MORE else self._carried.pop(place, None)
                if carried is not None:
                    carried.answered(prefix, frame)
        finally:
            self._busy = False
            self._flush()
        if self._ready:
            self._schedule()
        self.answers_came()
        self._go_on()

    def link_lost(self, shard: int, error: BrokerError | None = None) -> None:
        """Fail the requests to a shard that does not respond any more."""
        super().link_lost(shard)
        for place in [place for place in self._carried if place[0] == shard]:
            carried = self._carried.pop(place, None)
            if carried is not None:
                carried.failed(error or Unavailable(ErrorCode.STOPPING, LOST))

    # Client

    def close(self) -> None:
        """Close the links and drop forwarded requests."""
        super().close()
        self._carried.clear()
        self._links.close()

    def _replace_links(self, frame: bytes) -> None:
        """Replace the links after a login, because the old ones belong to the previous user."""
        self._login = frame
        for link in self._links:
            link.close()
            self.link_lost(link.shard, Denied(ErrorCode.LOGIN_REQUIRED, "the connection is logging in again"))


class _One:
    """A request to one shard. Its response frames go to the client unchanged."""

    __slots__ = ("_holds", "_prefix", "_session")

    def __init__(self, session: CarryingSession, prefix: Prefix, *, holds: bool) -> None:
        self._session: Final = session
        self._prefix: Final = prefix
        self._holds: Final = holds

    def answered(self, prefix: Prefix, frame: bytes) -> None:
        """See ``Carried``."""
        self._session.pass_on(frame)
        if not prefix.flags & MORE:
            self._session.over(holds=self._holds)

    def failed(self, error: BrokerError) -> None:
        """See ``Carried``."""
        self._session.refuse(self._prefix.verb, self._prefix.correlation, error)
        self._session.over(holds=self._holds)


class _Several:
    """A request to several shards, one after the other, with one combined response. Later requests wait."""

    __slots__ = ("_gathered", "_prefix", "_session")

    def __init__(self, session: CarryingSession, prefix: Prefix, gathered: Gathered) -> None:
        self._session: Final = session
        self._prefix: Final = prefix
        self._gathered: Final = gathered

    def ask_next(self) -> None:
        """Send the request to the next shard, or respond after the last one."""
        verb, correlation = self._prefix.verb, self._prefix.correlation
        question = self._gathered.next_question()
        if question is not None:
            shard, head = question
            self._session.carry(shard, correlation, encode_head(verb, correlation, head), self)
            return
        head = self._gathered.whole()
        self._session.pass_on(encode_head(verb, correlation, head, flags=ERROR if isinstance(head, Failure) else 0))
        self._session.over(holds=True)

    def answered(self, prefix: Prefix, frame: bytes) -> None:
        """See ``Carried``."""
        head = frame[PREFIX_BYTES : PREFIX_BYTES + prefix.head_bytes]
        if prefix.flags & ERROR:
            self._gathered.refused(decode_answer(head, Failure))
        else:
            self._gathered.answered(head)
        self.ask_next()

    def failed(self, error: BrokerError) -> None:
        """See ``Carried``."""
        self._session.refuse(self._prefix.verb, self._prefix.correlation, error)
        self._session.over(holds=True)
