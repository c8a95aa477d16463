"""A client's session in a broker of several processes: it forwards requests to the other processes (decision 0128).

* If the target process restarts before it responds, the request is sent again if running it twice is harmless.
  Otherwise the failure is reported to the client.
* A request that is not forwarded, and names a topic of another process, gets the error that makes clients look up the
  topic's leader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from polywire.broker.access import Principal
from polywire.errors import ErrorCode, NotOwner, PeerError
from polywire.protocols.kafka.context import Shared
from polywire.protocols.kafka.messages import NO_ID, Api, Request
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import Command, Handler, KafkaSession
from polywire.protocols.kafka.shard_link import Context, KafkaLink, Then
from polywire.protocols.kafka.topics_elsewhere import TopicsElsewhere
from polywire.protocols.runtime.links import Links
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import ReachedShards

# how long a request waits for a process to respond or restart; clients wait 30 s or more, and repeat their requests
LIMIT_S: Final = 5.0
AGAIN_S: Final = 0.1  # pause before a request to a restarting process is repeated

Bodies = dict[int, Any]
"""Bodies of responses by shard; None if a shard did not respond."""


class CarryingKafkaSession(KafkaSession):
    """The session of one client, with links to the other processes."""

    __slots__ = ("_links", "elsewhere", "shards")

    def __init__(
        self,
        shared: Shared,
        elsewhere: TopicsElsewhere,
        table: Mapping[Api, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        """``elsewhere`` has the topics of other shards."""
        super().__init__(shared, table, output, resume)
        assert shared.shards is not None, "this session needs several shards"
        self.shards: Final[ReachedShards] = shared.shards
        self.elsewhere: Final = elsewhere
        self._links: Final = Links(partial(_link, shared.shards, self))

    @property
    def context(self) -> Context:
        user = None if self.broker.access.is_open else self.principal.name
        host, port = self.output.local
        return Context(user, self.output.peer, host, self.shards.listener_of(port), self.shards.own, self.broker.epoch)

    def check_here(self, topic: str) -> None:
        if self.shards.shard_of(topic) not in (None, self.shards.own):
            raise NotOwner(ErrorCode.NOT_OWNER, f"another process owns the topic name={topic!r}")

    def logged_in(self, principal: Principal) -> None:
        """Set the user, and close links that were opened for the previous one.

        Raises Busy if there are too many connections.
        """
        super().logged_in(principal)
        self._links.close()

    def ask(self, shard: int, request: Request, then: Then) -> None:
        self._links.to(shard).ask(request.api, request.version, request.body, then, client_id=request.client_id)

    # Called by links

    def link_lost(self, shard: int) -> None:
        """Drop the link to a process that has ended. Callers then get None for their pending requests."""
        self._links.forget(shard)

    def relieved(self) -> None:
        self._go_on()

    def _waits(self) -> bool:
        return super()._waits() or self._links.are_clogged

    def close(self) -> None:
        super().close()
        self._links.close()


def _link(shards: ReachedShards, owner: CarryingKafkaSession, shard: int) -> KafkaLink:
    return KafkaLink(shards, shard, owner)


class Question:
    """One request to one shard. ``then`` is called exactly once, but never after ``cancel``."""

    __slots__ = ("_again", "_request", "_session", "_shard", "_then", "_timer")

    def __init__(
        self,
        session: CarryingKafkaSession,
        shard: int,
        request: Request,
        then: Then,
        *,
        again: bool,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Send the request.

        If ``again``, it may be sent again when its response is lost. After ``limit_s``, ``then`` gets None.
        """
        self._session: Final = session
        self._shard: Final = shard
        self._request: Final = request
        self._then: Then | None = then
        self._again: Final = again
        self._timer: Final = session.broker.loop.call_later(limit_s, self._end, None)
        self._ask()

    def _ask(self) -> None:
        if self._then is not None:
            self._session.ask(self._shard, self._request, self._came)

    def _came(self, body: Any) -> None:
        if body is None and self._again:
            self._session.broker.loop.call_later(AGAIN_S, self._ask)
        else:
            self._end(body)

    def _end(self, body: Any) -> None:
        then, self._then = self._then, None
        if then is not None:
            self._timer.cancel()
            then(body)

    def cancel(self) -> None:
        self._then = None
        self._timer.cancel()


def ask_shards(
    session: CarryingKafkaSession,
    answer: Answer,
    bodies: Mapping[int, Any],
    then: Callable[[Bodies], Any],
    *,
    version: int | None = None,
    again: bool = True,
) -> None:
    """Send the client's request to shards, each with its own body, and respond as ``ask_each`` does.

    The requests have the version ``version``, by default that of the client's request.
    """
    asked = answer.request if version is None else answer.request._replace(version=version)
    requests = {shard: asked._replace(body=body) for shard, body in bodies.items()}
    ask_each(session, answer, requests, then, again=again)


def ask_each(
    session: CarryingKafkaSession,
    answer: Answer,
    requests: Mapping[int, Request],
    then: Callable[[Bodies], Any],
    *,
    again: bool = True,
    limit_s: float = LIMIT_S,
) -> None:
    """Send a request to each of these shards, and respond with the result of ``then``.

    If the result is None, the response is sent later by other means. If ``again``, a lost request may be sent again
    until ``limit_s`` seconds have passed. If ``then`` raises PeerError, the connection is closed.
    """
    found: Bodies = {}
    questions: list[Question] = []

    def came(shard: int, body: Any) -> None:
        found[shard] = body
        if len(found) == len(requests):
            end()

    def end() -> None:
        go_on(session, answer, partial(then, found))

    def cancel() -> None:
        for question in questions:
            question.cancel()

    if not requests:
        end()
        return
    answer.cancel = cancel
    for shard, request in requests.items():
        questions.append(Question(session, shard, request, partial(came, shard), again=again, limit_s=limit_s))


def go_on(session: CarryingKafkaSession, answer: Answer, then: Callable[[], Any]) -> None:
    """Respond with the result of ``then``. If the result is None, the response is sent later."""
    answer.cancel = None
    try:
        made = then()
    except PeerError as error:
        session.fail(error)
        return
    if made is not None:
        answer.ok(made)


def once(
    session: CarryingKafkaSession,
    answer: Answer,
    wait: Callable[[Callable[[], None]], Callable[[], None] | None],
    then: Callable[[], Any],
) -> None:
    """Respond with the result of ``then`` when ``wait`` has called back.

    ``wait`` may call back immediately. Otherwise it returns a function that cancels the wait.
    """
    cancel = wait(partial(go_on, session, answer, then))
    if cancel is not None:
        answer.cancel = cancel


def with_ids(handler: Handler, ids: Callable[[Any], Iterable[bytes]]) -> Handler:
    """Return a handler that first finds the shards of the topics that a request names by id."""

    def handle(session: KafkaSession, answer: Answer, request: Any, /) -> None:
        assert isinstance(session, CarryingKafkaSession), "only this type of session has these handlers"
        wait = partial(session.elsewhere.located, [id_ for id_ in ids(request) if id_ != NO_ID])
        once(session, answer, wait, partial(handler, session, answer, request))

    return handle


def changed(record: Any, **fields: Any) -> Any:
    """Return a copy of a record in which these fields have other values."""
    return type(record)(**{name: getattr(record, name) for name in record.DEFAULTS} | fields)
