"""Group requests without a connection: encoded, decoded and executed, and their responses decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polywire.broker.access import Principal, Where
from polywire.broker.owners import Caller, caller_of
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.protocols.kafka import consumer_groups, group_lists, groups, positions, producers, schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.codec import decode_request, encode_response
from polywire.protocols.kafka.messages import Api, Request
from polywire.testing.memory_broker import MemoryBroker

HANDLERS: dict[Api, Callable[..., Any]] = {
    Api.JOIN_GROUP: groups.join_group,
    Api.SYNC_GROUP: groups.sync_group,
    Api.HEARTBEAT: groups.heartbeat,
    Api.LEAVE_GROUP: groups.leave_group,
    Api.OFFSET_COMMIT: positions.offset_commit,
    Api.OFFSET_FETCH: positions.offset_fetch,
    Api.OFFSET_DELETE: positions.offset_delete,
    Api.LIST_GROUPS: group_lists.list_groups,
    Api.DESCRIBE_GROUPS: group_lists.describe_groups,
    Api.CONSUMER_GROUP_DESCRIBE: group_lists.consumer_group_describe,
    Api.DELETE_GROUPS: group_lists.delete_groups,
    Api.CONSUMER_GROUP_HEARTBEAT: consumer_groups.consumer_group_heartbeat,
    Api.INIT_PRODUCER_ID: producers.init_producer_id,
}


class Reported:
    """A response that may still be pending; ``body`` is its decoded form."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cancel: Callable[[], None] | None = None
        self.bodies: list[Any] = []

    def ok(self, body: Any) -> None:
        frame = b"".join(bytes(part) for part in encode_response(self.request, body))
        _, decoded = decode_response(self.request.api, self.request.version, frame[4:])
        self.bodies.append(decoded)

    @property
    def body(self) -> Any:
        """Return the only response."""
        [body] = self.bodies
        return body


class Asker:
    """A client of one broker."""

    def __init__(
        self, memory: MemoryBroker, *, principal: Principal | None = None, client_id: str | None = "me"
    ) -> None:
        self.memory = memory
        self.broker = memory.broker
        self.peer_address = "127.0.0.1:5000"
        self.client_id = client_id
        self._principal = principal

    @property
    def principal(self) -> Principal:
        return self._principal or self.broker.access.nameless(None)

    @property
    def caller(self) -> Caller:
        return caller_of(self._principal, self.peer_address)

    def authorize(self, action: Action, where: Where = None) -> None:
        self.broker.access.authorize(self.principal, action, where)

    def leads(self, topic: Topic) -> bool:
        """There is one process."""
        return True

    def permits(self, action: Action, where: Where = None) -> bool:
        return self.broker.access.permits(self.principal, action, where)

    def begin(self, api: Api, version: int, **fields: Any) -> Reported:
        """Send a request without waiting for the response."""
        self.broker = self.memory.broker
        sent = encode_request(api, version, 7, schema.request(api)(**fields), client_id=self.client_id)
        reported = Reported(decode_request(sent[4:]))
        body = HANDLERS[api](self, reported, reported.request.body)
        if body is not None:
            reported.ok(body)
        return reported

    def ask(self, api: Api, version: int, **fields: Any) -> Any:
        """Send a request and return the response."""
        reported = self.begin(api, version, **fields)
        self.memory.run()
        return reported.body
