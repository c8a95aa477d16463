"""List group names over any protocol that supports it, and create errors that list the existing names."""

from __future__ import annotations

from collections.abc import Sequence

from polywire.choices import missing
from polywire.client.base import WireClient
from polywire.client.iggy import IggyClient
from polywire.client.kafka import KafkaClient
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode, Missing


async def group_names(client: WireClient, topic: str | None = None) -> Sequence[str] | None:
    """Return the groups of a topic, or of all topics. Return None if the protocol cannot list them."""
    match client:
        case PolywireClient() | KafkaClient():
            return sorted({group.name for group in await client.groups() if topic in (None, group.topic)})
        case IggyClient() if topic is not None:
            return list(await client.group_members(topic))
        case _:
            return None


async def no_such_group(client: WireClient, group: str, topic: str | None = None) -> Missing:
    """Return the error for a group that does not exist. It lists the existing groups of the topic, or of all topics."""
    facts = "" if topic is None else f"topic={topic!r}"
    known = await group_names(client, topic)
    if known is None:
        return Missing(
            ErrorCode.GROUP_MISSING, f"no such group, or it has no committed offsets group={group!r} {facts}"
        )
    error = missing(ErrorCode.GROUP_MISSING, "group", group, known, facts=facts)
    if type(client) is IggyClient:  # the dialect of 2023; the client of today's dialect is a subclass
        advice = "(without a login, Iggy groups have numbers only: use iggy://name:password@host:port)"
        return Missing(error.code, f"{error.message} {advice}")
    return error


async def no_such_topic(client: WireClient, topic: str, *, facts: str = "") -> Missing:
    """Return the error for a topic that does not exist. It lists the existing topics."""
    known = [info.name for info in await client.topics()]
    return missing(ErrorCode.TOPIC_MISSING, "topic", topic, known, facts=facts)
