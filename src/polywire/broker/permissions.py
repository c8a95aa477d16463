"""All permissions, and the actions for which protocols require them.

* A permission is granted everywhere, in a stream, or on one topic. Grants are immutable. A permission may imply others,
  which are granted with it.
* An action names one permission, or several of which one is enough. It also names the kind of resource, and which part
  of a topic's access list (readers or writers) applies. Protocols name actions, never permissions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, IntFlag
from typing import Final

import msgspec

from polywire import names
from polywire.broker.settings import Listed
from polywire.errors import ErrorCode, Invalid
from polywire.types import TopicName

_BETWEEN: Final = "/"  # between a stream and its topic
# names in words must not contain these characters, because lists of words are split there
_WORD_RESERVED: Final = (names.WHITE - names.CONTROLS) | {",", _BETWEEN}
_IN_STREAMS: Final = frozenset(_BETWEEN)


class Permission(IntFlag):
    """One permission. The numbers are stored, so they must never change."""

    MANAGE_SERVERS = 1
    READ_SERVERS = 2
    MANAGE_USERS = 4
    READ_USERS = 8
    MANAGE_STREAMS = 16
    READ_STREAMS = 32
    MANAGE_TOPICS = 64
    READ_TOPICS = 128
    CONSUME = 256
    PRODUCE = 512
    GROUP = 1024
    TRANSACTION = 2048


ALL: Final = Permission(4095)
NOTHING: Final = Permission(0)
# Ordered so that one pass is enough: a permission precedes those that it includes.
_INCLUDES: Final = (
    (Permission.MANAGE_SERVERS, Permission.READ_SERVERS),
    (Permission.MANAGE_USERS, Permission.READ_USERS),
    (Permission.MANAGE_STREAMS, Permission.READ_STREAMS | Permission.MANAGE_TOPICS),
    (Permission.READ_STREAMS, Permission.READ_TOPICS),
    (Permission.MANAGE_TOPICS, Permission.READ_TOPICS | Permission.PRODUCE | Permission.TRANSACTION),
    (Permission.READ_TOPICS, Permission.CONSUME | Permission.GROUP),
)
_SEVERAL: Final = {"all": ALL, "admin": Permission.MANAGE_SERVERS | Permission.MANAGE_USERS | Permission.MANAGE_STREAMS}
_BROKER_WIDE: Final = (
    Permission.MANAGE_SERVERS | Permission.READ_SERVERS | Permission.MANAGE_USERS | Permission.READ_USERS
)
_WORDS: Final = {permission.name.lower(): permission for permission in Permission if permission.name} | _SEVERAL


def opened(permissions: int) -> int:
    """Return these permissions and all that they imply."""
    for having, included in _INCLUDES:
        if permissions & having:
            permissions |= included
    return permissions


def resource_name(stream: str, topic: str) -> str:
    """Return ``stream/topic``, a topic's name in grants. A ``/`` in the stream's name is escaped (decision 0116)."""
    return f"{names.escape(stream, _IN_STREAMS)}{_BETWEEN}{topic}"


def split_resource_name(name: str) -> tuple[str, str]:
    """Split ``stream/topic`` as returned by ``resource_name``."""
    stream, _, topic = name.partition(_BETWEEN)
    return names.unescape(stream), topic


class Grants(msgspec.Struct, frozen=True, array_like=True):
    """A user's permissions: on everything, by stream name, and by topic (``stream/topic``)."""

    everywhere: int = 0
    streams: dict[str, int] = {}
    topics: dict[str, int] = {}

    def opened(self) -> Grants:
        """Return the grants with all implied permissions and normalized topic names."""
        topics: dict[str, int] = {}
        for resource, given in self.topics.items():
            stream, topic = split_resource_name(resource)
            name = TopicName.parse(TopicName(stream, topic).full)
            key = resource if "." in stream else resource_name(name.stream, name.topic)
            topics[key] = opened(topics.get(key, 0) | given)
        return Grants(opened(self.everywhere), {name: opened(given) for name, given in self.streams.items()}, topics)

    def allow(self, bits: int, stream: str | None, topic: str | None) -> bool:
        """Return whether one of these permissions is granted for a resource.

        The resource is a topic, a stream if ``topic`` is None, or everything if ``stream`` is None, too. The grants
        must be the result of ``opened``.
        """
        if bits & self.everywhere:
            return True
        if stream is None:
            return False
        if bits & self.streams.get(stream, 0):
            return True
        return topic is not None and bool(bits & self.topics.get(resource_name(stream, topic), 0))

    def cover(self, others: Grants) -> bool:
        """Return whether these grants include all of ``others``. Both must be results of ``opened``."""
        if others.everywhere & ~self.everywhere:
            return False
        for stream, given in others.streams.items():
            if given & ~(self.everywhere | self.streams.get(stream, 0)):
                return False
        for resource, given in others.topics.items():
            stream, _ = split_resource_name(resource)
            if given & ~(self.everywhere | self.streams.get(stream, 0) | self.topics.get(resource, 0)):
                return False
        return True

    def allow_somewhere(self, bits: int) -> bool:
        """Return whether one of these permissions is granted for any resource.

        The grants must be the result of ``opened``.
        """
        granted = (self.everywhere, *self.streams.values(), *self.topics.values())
        return any(bits & given for given in granted)

    def name(self, bits: int, stream: str, topic: str) -> bool:
        """Return whether one of these permissions is granted for exactly this stream or topic.

        The grants must be the result of ``opened``.
        """
        return bool(bits & self.streams.get(stream, 0) or bits & self.topics.get(resource_name(stream, topic), 0))


EVERYTHING: Final = Grants(int(ALL))


def parse_grants(words: Iterable[str]) -> Grants:
    """Parse words such as ``consume``, ``produce@shop`` (a stream) or ``consume@shop/orders``.

    Names may contain ``%XX``. Raises Invalid(INVALID_REQUEST), and Invalid(INVALID_TOPIC) for an invalid escape.
    """
    everywhere = 0
    granted: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for word in words:
        name, at, resource = word.partition("@")
        permission = _WORDS.get(name)
        if permission is None or (at and not resource):
            known = ", ".join(sorted(_WORDS))
            raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown permission: {word!r} (use one of {known})")
        if at:
            stream, between, topic = resource.partition(_BETWEEN)
            named = resource_name(names.unescape(stream), names.unescape(topic)) if between else names.unescape(stream)
            kept = granted[bool(between)]
            kept[named] = kept.get(named, 0) | permission
        else:
            everywhere |= permission
    return Grants(int(everywhere), *({key: int(value) for key, value in kept.items()} for kept in granted))


def new_grants(words: Sequence[str]) -> Grants:
    """Parse words for a user that is created or changed.

    Raises the errors of ``parse_grants``, and Invalid(INVALID_REQUEST) for words that cannot grant anything, or not what
    their author expects. ``parse_grants`` accepts those, because stored grants may have them.
    """
    grants = parse_grants(words)
    for word in words:
        name, at, resource = word.partition("@")
        if not at:
            continue
        stream, between, topic = resource.partition(_BETWEEN)
        if not stream or (between and not topic):
            reason = "write name@stream or name@stream/topic"
        elif "*" in resource:
            reason = "names are not patterns; write %2A if the name has a *"
        elif not _WORDS.get(name, NOTHING) & ~_BROKER_WIDE:
            reason = f"{name} applies to the whole broker; write it without @"
        else:
            continue
        raise Invalid(ErrorCode.INVALID_REQUEST, f"permission would grant nothing: {word!r} ({reason})")
    return grants


def grant_words(grants: Grants) -> list[str]:
    """Return the shortest list of words that ``parse_grants`` parses into these grants."""
    words = _words(grants.everywhere)
    for stream, given in sorted(grants.streams.items()):
        words += (f"{word}@{names.escape(stream, _WORD_RESERVED)}" for word in _words(given))
    for resource, given in sorted(grants.topics.items()):
        stream, topic = split_resource_name(resource)
        spelled = f"{names.escape(stream, _WORD_RESERVED)}{_BETWEEN}{names.escape(topic, _WORD_RESERVED)}"
        words += (f"{word}@{spelled}" for word in _words(given))
    return words


def _words(given: int) -> list[str]:
    for word, permission in _SEVERAL.items():
        if given == permission:
            return [word]
    return [word for word, permission in _WORDS.items() if permission & given and word not in _SEVERAL]


class Resource(Enum):
    """Kind of resource on which an action needs a permission."""

    NOTHING = "nothing"
    BROKER = "the broker"
    STREAM = "the stream"
    TOPIC = "the topic"
    ANY_STREAM = "any stream"
    ANY_TOPIC = "any topic"


_SEEN_BY: Final = Permission.CONSUME | Permission.PRODUCE  # readers and writers of a topic may see its description


class Action(Enum):
    """One action: its name, the permission that it needs, and the kind of resource.

    Attributes:
        listed: which list of a topic's ``AccessList``, readers or writers, must contain the user.
    """

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
    TOPIC_LINK = "topic.link", Permission.MANAGE_SERVERS, Resource.BROKER
    PRODUCE = "produce", Permission.PRODUCE, Resource.TOPIC, Listed.WRITERS
    STAGED_PUBLISH = "staged.publish", Permission.PRODUCE, Resource.ANY_TOPIC
    FETCH = "fetch", Permission.CONSUME, Resource.TOPIC, Listed.READERS
    QUERY = "query", Permission.CONSUME, Resource.ANY_TOPIC
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
        """The permissions as words of a user's grants. Any one of them is sufficient."""
        return " or ".join(str(permission.name).lower() for permission in self.permission)

    @property
    def needs_no_permission(self) -> bool:
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
        Action.TOPIC_LINK,
        Action.GROUP_DELETE,
    }
)
"""Actions that are audited even if they are permitted. Changes of users and tokens are audited where they are made."""
