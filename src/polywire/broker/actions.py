"""The permission table of all protocols: each action of the broker and the permissions it needs.

An action names one permission, or several of which one is enough. It also names the kind of resource, and which part of
a topic's access list (readers or writers) applies. Protocols name actions, never permissions.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from polywire.broker.permissions import NOTHING, Permission
from polywire.broker.settings import Listed


class Resource(Enum):
    """Kind of resource on which a permission must be granted."""

    NOTHING = "nothing"
    BROKER = "the broker"
    STREAM = "the stream"
    TOPIC = "the topic"
    ANY_STREAM = "any stream"
    ANY_TOPIC = "any topic"


_SEEN_BY: Final = Permission.CONSUME | Permission.PRODUCE  # readers and writers of a topic may see its description


class Action(Enum):
    """One action: its name, permission and kind of resource, and the part of a topic's access list that applies."""

    CONNECT = "connect", NOTHING, Resource.NOTHING
    SELF_DESCRIBE = "self.describe", NOTHING, Resource.NOTHING
    TOKEN_CREATE = "token.create", NOTHING, Resource.NOTHING
    TOKEN_DELETE = "token.delete", NOTHING, Resource.NOTHING
    CLUSTER_DESCRIBE = "cluster.describe", NOTHING, Resource.NOTHING
    CLUSTER_ALTER = "cluster.alter", Permission.MANAGE_SERVERS, Resource.BROKER
    SERVER_DESCRIBE = "server.describe", Permission.READ_SERVERS, Resource.BROKER
    USER_DESCRIBE = "user.describe", Permission.READ_USERS, Resource.BROKER
    USER_CREATE = "user.create", Permission.MANAGE_USERS, Resource.BROKER
    USER_ALTER = "user.alter", Permission.MANAGE_USERS, Resource.BROKER
    USER_DELETE = "user.delete", Permission.MANAGE_USERS, Resource.BROKER
    STREAM_LIST = "stream.list", Permission.READ_STREAMS, Resource.ANY_STREAM
    STREAM_DESCRIBE = "stream.describe", Permission.READ_STREAMS, Resource.STREAM
    STREAM_CREATE = "stream.create", Permission.MANAGE_STREAMS, Resource.STREAM
    STREAM_ALTER = "stream.alter", Permission.MANAGE_STREAMS, Resource.STREAM
    STREAM_DELETE = "stream.delete", Permission.MANAGE_STREAMS, Resource.STREAM
    TOPIC_LIST = "topic.list", _SEEN_BY, Resource.ANY_TOPIC
    TOPIC_DESCRIBE = "topic.describe", _SEEN_BY, Resource.TOPIC
    TOPIC_CREATE = "topic.create", Permission.MANAGE_TOPICS, Resource.TOPIC
    TOPIC_ALTER = "topic.alter", Permission.MANAGE_TOPICS, Resource.TOPIC
    TOPIC_PURGE = "topic.purge", Permission.MANAGE_TOPICS, Resource.TOPIC
    TOPIC_DELETE = "topic.delete", Permission.MANAGE_TOPICS, Resource.TOPIC
    PRODUCE = "produce", Permission.PRODUCE, Resource.TOPIC, Listed.WRITERS
    STAGED_PUBLISH = "staged.publish", Permission.PRODUCE, Resource.ANY_TOPIC
    FETCH = "fetch", Permission.CONSUME, Resource.TOPIC, Listed.READERS
    POSITION_FETCH = "position.fetch", Permission.CONSUME, Resource.TOPIC, Listed.READERS
    POSITION_COMMIT = "position.commit", Permission.CONSUME, Resource.TOPIC, Listed.READERS
    OFFSET_FETCH = "offset.fetch", Permission.GROUP, Resource.TOPIC, Listed.READERS
    OFFSET_COMMIT = "offset.commit", Permission.GROUP, Resource.TOPIC, Listed.READERS
    GROUP_LIST = "group.list", Permission.GROUP, Resource.ANY_TOPIC
    GROUP_DESCRIBE = "group.describe", Permission.GROUP, Resource.TOPIC, Listed.READERS
    GROUP_CREATE = "group.create", Permission.GROUP, Resource.TOPIC, Listed.READERS
    GROUP_JOIN = "group.join", Permission.GROUP, Resource.TOPIC, Listed.READERS
    GROUP_DELETE = "group.delete", Permission.GROUP, Resource.TOPIC, Listed.READERS
    TRANSACTION = "transaction", Permission.TRANSACTION, Resource.ANY_TOPIC

    __hash__ = object.__hash__  # members are singletons; an enum's own hash is a Python call for every check

    def __init__(self, word: str, permission: Permission, resource: Resource, listed: Listed | None = None) -> None:
        self.word: Final = word
        self.permission: Final = permission
        self.bits: Final = int(permission)  # flag operations of enums are slow
        self.resource: Final = resource
        self.listed: Final = listed

    @property
    def permission_words(self) -> str:
        """The permissions as written in grants; any one of them allows the action."""
        return " or ".join(str(permission.name).lower() for permission in self.permission)

    @property
    def is_everybodys(self) -> bool:
        """Whether the action needs no permission."""
        return not self.bits


ANYBODY: Final = frozenset({Action.CONNECT})
"""Actions that need no login."""

ADMINISTRATION: Final = frozenset(
    {
        Action.CLUSTER_ALTER,
        Action.STREAM_CREATE,
        Action.STREAM_ALTER,
        Action.STREAM_DELETE,
        Action.TOPIC_CREATE,
        Action.TOPIC_ALTER,
        Action.TOPIC_PURGE,
        Action.TOPIC_DELETE,
        Action.GROUP_DELETE,
    }
)
"""Actions that are audited even if they are permitted. Changes of users and tokens are audited where they are made."""
