"""A Kafka session in a broker with several processes: forward requests to the other processes (decision 0128).

* If the other process restarts before it responds, an idempotent request is sent again. For other requests the client
  gets an error.
* A request for records of a topic of another process gets the error that makes clients look up the topic's leader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from polywire.broker.groups.consumer import TOPICS_MAX
from polywire.broker.owners import Caller
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, PeerError
from polywire.log.base import Handle, Loop
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.configs import TOPIC
from polywire.protocols.kafka.context import KafkaRouter, Shared, node_of
from polywire.protocols.kafka.forwarded import Origin
from polywire.protocols.kafka.messages import NO_ID, WIRE, Api, Request
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import LENGTH_BYTES, Command, KafkaSession
from polywire.protocols.kafka.structures import Record
from polywire.protocols.kafka.topics import is_topic_name, names_all
from polywire.protocols.runtime.forwarded import Sender
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import ReachedShards
from polywire.types import TopicName

# how long a request waits for a process to respond or restart; clients wait 30 s or more, and repeat their requests
LIMIT_S: Final = 5.0
AGAIN_S: Final = 0.1  # pause before a request to a restarting process is repeated


Then = Callable[[Any], None]
"""Called with the body of a response, or with None if there will be no response."""
Send = Callable[[Then], Handle | None]
"""Sends a request to another process. Returns a handle that cancels the request, or None if that is not possible."""
Bodies = dict[int, Any]
"""Bodies of responses by shard; None if a shard did not respond."""


class RoutedKafkaSession(KafkaSession):
    """The session of one client."""

    __slots__ = ("_origin", "router", "shards")

    def __init__(
        self,
        shared: Shared,
        router: KafkaRouter,
        table: Mapping[Api, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(shared, table, output, resume)
        self.router: Final = router
        self.shards: Final[ReachedShards] = router.shards
        self._origin: Final = Origin(router.shards.own, router.epoch).encode()

    def leads(self, topic: Topic) -> bool:
        return self.router.shard_of_topic(topic) == self.shards.own

    def node_of(self, topic: Topic) -> int:
        return node_of(self.router.shard_of_topic(topic))

    def coordinator(self, name: str) -> int:
        return node_of(self.shards.shard_by_hash(name))

    def nodes(self) -> dict[int, tuple[str, int]]:
        """Return the nodes, without processes that have not reported their ports yet."""
        host, port = self.output.local
        listener = self.shards.listener_of(port)
        found = {self.shared.node_id: self.address}
        for shard, process in self.router.processes.items():
            if listener in process.ports:
                found[node_of(shard)] = (process.host or self.shared.settings.host or host, process.ports[listener])
        return dict(sorted(found.items()))

    def _prepare(self, request: Request) -> None:
        body = request.body
        if body is None:
            return
        if request.api in NODES:
            self.router.know_processes(range(self.shards.count))
            if 0 in self.router.processes:  # the first shard chooses the cluster id
                self.shared.learn_cluster_id(self.router.processes[0].cluster_id)
        if request.api in LISTS and names_all(request.api, request.version, body.topics):
            with suppress(BrokerError):
                self.router.require_latest()
        names, ids = names_and_ids(request.api, body)
        if names or ids:
            creates = self._creates if request.api is Api.METADATA and body.may_create else _never
            self.router.resolve(names, ids, creates=creates)

    def _creates(self, name: str) -> Caller | None:
        """Return the client if Metadata may create this topic for it."""
        if not is_topic_name(name) or not self.permits(Action.TOPIC_CREATE, TopicName.parse(name)):
            return None
        return self.caller

    @property
    def _sender(self) -> Sender:
        user = None if self.broker.access.is_open else self.principal.name
        return Sender(user, self.output.peer, self._origin)

    def ask(self, shard: int, request: Request, then: Then) -> Handle:
        """Execute a request in the process of a shard.

        ``then`` gets the body of the response, or None if there is no response.
        """
        return ask_shard(self.router, shard, self._sender, request, then)


def ask_shard(router: KafkaRouter, shard: int, sender: Sender, request: Request, then: Then) -> Handle:
    """Execute a request in the process of a shard.

    ``then`` gets the body of the response. It gets None if the process has ended, or rejects the request.
    """

    def came(frame: bytes | BrokerError) -> None:
        then(None if isinstance(frame, BrokerError) else _body(request, frame))

    frame = encode_request(request.api, request.version, 0, request.body, client_id=request.client_id)
    return router.execute(shard, WIRE, sender, frame, came)


def _body(request: Request, frame: bytes) -> Any:
    return decode_response(request.api, request.version, frame[LENGTH_BYTES:])[1]


NODES: Final = frozenset({Api.METADATA, Api.DESCRIBE_CLUSTER, Api.FIND_COORDINATOR})
"""Requests whose response has the addresses of processes."""
LISTS: Final = frozenset({Api.METADATA, Api.DESCRIBE_TOPIC_PARTITIONS})
"""Requests that can ask for all topics."""
_TOPICS: Final[Mapping[Api, str]] = {
    Api.PRODUCE: "topics",
    Api.FETCH: "topics",
    Api.LIST_OFFSETS: "topics",
    Api.METADATA: "topics",
    Api.CREATE_TOPICS: "topics",
    Api.CREATE_PARTITIONS: "topics",
    Api.DELETE_TOPICS: "topics",
    Api.DESCRIBE_TOPIC_PARTITIONS: "topics",
    Api.ELECT_LEADERS: "topic_partitions",
    Api.OFFSET_COMMIT: "topics",
    Api.OFFSET_FETCH: "topics",
    Api.OFFSET_DELETE: "topics",
}
"""Fields of requests with entries that name topics."""


def names_and_ids(api: Api, body: Any) -> tuple[list[str], list[bytes]]:
    """Return the names and ids of the topics that the handler of a request looks up."""
    if api is Api.CONSUMER_GROUP_HEARTBEAT:
        names = body.subscribed_topic_names or []
        return (names if len(names) <= TOPICS_MAX else []), []
    if api in (Api.DESCRIBE_CONFIGS, Api.ALTER_CONFIGS, Api.INCREMENTAL_ALTER_CONFIGS):
        return [one.resource_name for one in body.resources if one.resource_type == TOPIC], []
    if api not in _TOPICS:
        return [], []
    entries = list(getattr(body, _TOPICS[api]) or ())
    entries += [one for group in getattr(body, "groups", ()) for one in group.topics or ()]
    ids = [id_ for one in entries if (id_ := getattr(one, "topic_id", NO_ID)) != NO_ID]
    named = [getattr(one, "name", None) or getattr(one, "topic", None) for one in entries]
    return [*(name for name in named if name), *(getattr(body, "topic_names", None) or ())], ids


def _never(_: str) -> Caller | None:
    """Create no topic."""


class ShardRequest:
    """One request to one shard. ``then`` is called exactly once, but never after ``cancel``."""

    __slots__ = ("_again", "_call", "_loop", "_send", "_then", "_timer")

    def __init__(
        self,
        loop: Loop,
        send: Send,
        then: Then,
        *,
        again: bool,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Send the request.

        If ``again``, it may be sent again when its response is lost. After ``limit_s``, ``then`` gets None.
        """
        self._loop: Final = loop
        self._send: Final = send
        self._then: Then | None = then
        self._again: Final = again
        self._timer: Final = loop.call_later(limit_s, self._end, None)
        self._call: Handle | None = None
        self._ask()

    def _ask(self) -> None:
        if self._then is not None:
            self._call = self._send(self._came)

    def _came(self, body: Any) -> None:
        if body is None and self._again:
            self._loop.call_later(AGAIN_S, self._ask)
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
        if self._call is not None:
            self._call.cancel()


def ask_shards(
    session: RoutedKafkaSession,
    answer: Answer,
    bodies: Mapping[int, Record],
    then: Callable[[Bodies], Record | None],
    *,
    version: int | None = None,
    again: bool = True,
) -> None:
    """Send the client's request to shards, each with its own body, and respond as ``ask_each`` does.

    The requests have the version ``version``, by default that of the client's request.
    """
    asked = answer.request if version is None else answer.request._replace(version=version)
    requests = {shard: partial(session.ask, shard, asked._replace(body=body)) for shard, body in bodies.items()}
    ask_each(session, answer, requests, then, again=again)


def ask_each(
    session: RoutedKafkaSession,
    answer: Answer,
    requests: Mapping[int, Send],
    then: Callable[[Bodies], Record | None],
    *,
    again: bool = True,
    limit_s: float = LIMIT_S,
) -> None:
    """Send a request to each of these shards, which are the keys of ``requests``, and respond with the result of ``then``.

    If the result is None, the response is sent later by other means. If ``again``, a lost request may be sent again
    until ``limit_s`` seconds have passed. If ``then`` raises PeerError, the connection is closed.
    """
    found: Bodies = {}
    calls: list[ShardRequest] = []

    def came(shard: int, body: Any) -> None:
        found[shard] = body
        if len(found) == len(requests):
            end()

    def end() -> None:
        go_on(session, answer, partial(then, found))

    def cancel() -> None:
        for call in calls:
            call.cancel()

    if not requests:
        end()
        return
    answer.cancel = cancel
    for shard, send in requests.items():
        calls.append(ShardRequest(session.broker.loop, send, partial(came, shard), again=again, limit_s=limit_s))


def go_on(session: RoutedKafkaSession, answer: Answer, then: Callable[[], Record | None]) -> None:
    """Respond with the result of ``then``. If the result is None, the response is sent later."""
    answer.cancel = None
    try:
        made = then()
    except PeerError as error:
        session.fail(error)
        return
    if made is not None:
        answer.ok(made)


def routed(session: KafkaSession) -> RoutedKafkaSession:
    """Return the session as a ``RoutedKafkaSession``; every session is one if the broker has several processes."""
    assert isinstance(session, RoutedKafkaSession), "only this type of session has these handlers"
    return session
