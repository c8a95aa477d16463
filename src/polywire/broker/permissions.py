"""Permissions and their scope: everywhere, in a stream, or on one topic.

Grants are immutable. A permission may include others; these are added when a grant is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntFlag
from typing import Final

import msgspec

from polywire import names
from polywire.errors import ErrorCode, Invalid
from polywire.types import TopicName


class Permission(IntFlag):
    """One permission. The numbers are stored, so they must never change their meaning."""

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
_BETWEEN: Final = "/"  # between a stream and its topic
# names in words must not contain these characters, because lists of words are split there
_WORD_RESERVED: Final = (names.WHITE - names.CONTROLS) | {",", _BETWEEN}
_IN_STREAMS: Final = frozenset(_BETWEEN)
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
_WORDS: Final = {permission.name.lower(): permission for permission in Permission if permission.name} | _SEVERAL


def opened(permissions: int) -> int:
    """Return these permissions and all that they include."""
    for having, included in _INCLUDES:
        if permissions & having:
            permissions |= included
    return permissions


def resource_name(stream: str, topic: str) -> str:
    """Return a topic's name in grants: ``stream/topic``, with ``/`` in the stream's name escaped (decision 0116)."""
    return f"{names.escape(stream, _IN_STREAMS)}{_BETWEEN}{topic}"


def split_resource_name(name: str) -> tuple[str, str]:
    """Return stream and topic of ``resource_name``."""
    stream, _, topic = name.partition(_BETWEEN)
    return names.unescape(stream), topic


class Grants(msgspec.Struct, frozen=True, array_like=True):
    """Granted permissions: everywhere, by stream name, and by topic (``resource_name``)."""

    everywhere: int = 0
    streams: dict[str, int] = {}
    topics: dict[str, int] = {}

    def opened(self) -> Grants:
        """Return the grants with all included permissions and normalized topic names."""
        topics: dict[str, int] = {}
        for resource, given in self.topics.items():
            stream, topic = split_resource_name(resource)
            name = TopicName.parse(TopicName(stream, topic).full)
            key = resource if "." in stream else resource_name(name.stream, name.topic)
            topics[key] = opened(topics.get(key, 0) | given)
        return Grants(opened(self.everywhere), {name: opened(given) for name, given in self.streams.items()}, topics)

    def allow(self, bits: int, stream: str | None, topic: str | None) -> bool:
        """Return whether the grants include one of these permissions for a topic, for a stream, or everywhere (neither
        given).

        The grants must be expanded by ``opened``.
        """
        if bits & self.everywhere:
            return True
        if stream is None:
            return False
        if bits & self.streams.get(stream, 0):
            return True
        return topic is not None and bool(bits & self.topics.get(resource_name(stream, topic), 0))

    def cover(self, others: Grants) -> bool:
        """Return whether these grants include everything that the others do; both must be expanded by ``opened``."""
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
        """Return whether the grants, expanded by ``opened``, include one of these permissions for any resource."""
        granted = (self.everywhere, *self.streams.values(), *self.topics.values())
        return any(bits & given for given in granted)

    def name(self, bits: int, stream: str, topic: str) -> bool:
        """Return whether the grants, expanded by ``opened``, name exactly this stream or topic with one of these
        permissions.
        """
        return bool(bits & self.streams.get(stream, 0) or bits & self.topics.get(resource_name(stream, topic), 0))


EVERYTHING: Final = Grants(int(ALL))


def parse_grants(words: Iterable[str]) -> Grants:
    """Parse words such as ``consume``, ``produce@shop`` (a stream) or ``consume@shop/orders``; names may contain
    ``%XX``.

    Raises Invalid(INVALID_REQUEST), and Invalid(INVALID_TOPIC) for an invalid escape.
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


def grant_words(grants: Grants) -> list[str]:
    """Return the shortest list of words that ``parse_grants`` converts to these grants."""
    words = _words(grants.everywhere)
    for stream, given in sorted(grants.streams.items()):
        words += (f"{word}@{names.escape(stream, _WORD_RESERVED)}" for word in _words(given))
    for resource, given in sorted(grants.topics.items()):
        stream, topic = split_resource_name(resource)
        spelled = f"{names.escape(stream, _WORD_RESERVED)}{_BETWEEN}{names.escape(topic, _WORD_RESERVED)}"
        words += (f"{word}@{spelled}" for word in _words(given))
    return words


def _words(given: int) -> list[str]:
    """Return the words for the permissions of one scope."""
    for word, permission in _SEVERAL.items():
        if given == permission:
            return [word]
    return [word for word, permission in _WORDS.items() if permission & given and word not in _SEVERAL]
