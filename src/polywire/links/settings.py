"""Settings of topics, users and permissions at the source of a link.

* A topic that a link creates gets those settings of the source that exist here. The others are listed.
* Users and permissions are not carried. Those that the source shows are listed, with the commands that create them.
* The source is not trusted: numbers are limited to what the broker accepts, and lists have a limit.
"""

from __future__ import annotations

import asyncio
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from polywire.client.base import WireClient
from polywire.client.iggy import IggyClient
from polywire.client.kafka import KafkaClient
from polywire.client.kafka_admin import Acl, TopicConfig, acls, scram_users, topic_configs
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Denied, ErrorCode, Unavailable
from polywire.types import DEFAULT_STREAM

MILLISECOND_US: Final = 1000
LIMIT_MAX: Final = 2**62  # the broker's maximum of retention limits
RESPONSE_S: Final = 30.0
OTHERS_MAX: Final = 50  # settings of one topic that are listed; Kafka has about forty
LIST_MAX: Final = 200  # users and ACLs that are listed; the number of others is reported
TEXT_CHARS_MAX: Final = 200  # length of a name or value in a list

Value = int | str | None

_FROM_POLYWIRE: Final = (
    "compaction",
    "compression",
    "key_hash",
    "replication_factor",
    "retention_age_us",
    "retention_bytes",
)
_POLYWIRE_DEFAULTS: Final[Mapping[str, Value]] = {"table_columns": ""}
_COMPRESSIONS: Final = ("lz4", "zstd")

READ: Final = 3  # Kafka's operations
WRITE: Final = 4
_WORDS: Final = {
    2: "manage_topics",
    READ: "consume",
    WRITE: "produce",
    5: "manage_topics",
    6: "manage_topics",
    7: "manage_topics",
    8: "read_topics",
    10: "read_topics",
    11: "manage_topics",
}
_CLUSTER_WORDS: Final = {
    2: "admin",
    5: "manage_streams",
    7: "manage_servers",
    8: "read_servers",
    10: "read_servers",
    11: "manage_servers",
}
_WITHOUT_EQUAL: Final = 12  # IdempotentWrite: every user may produce idempotently
TOPIC: Final = 2  # Kafka's types of resources
GROUP: Final = 3
CLUSTER: Final = 4
TRANSACTIONAL_ID: Final = 5
LITERAL: Final = 3
PREFIXED: Final = 4
_RESOURCES: Final = {
    TOPIC: "topic",
    GROUP: "group",
    CLUSTER: "cluster",
    TRANSACTIONAL_ID: "transactional_id",
    6: "token",
    7: "user",
}
_OPERATIONS: Final = {
    2: "all",
    READ: "read",
    WRITE: "write",
    5: "create",
    6: "delete",
    7: "alter",
    8: "describe",
    9: "cluster_action",
    10: "describe_configs",
    11: "alter_configs",
    12: "idempotent_write",
}
ALLOW: Final = 3
EVERY: Final = "*"
USER: Final = "User:"


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """The settings of a topic at the source.

    Attributes:
        carried: settings for the topic here, by name.
        others: settings that are set for the topic and do not exist here, as ``name=value``.
    """

    carried: dict[str, Value] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


async def source_settings(source: WireClient, topic: str) -> SourceSettings:
    """Return the settings of a topic. A protocol without settings has none. Raises BrokerError.

    A user who may read the topic may not be allowed to see its settings. Then no settings are copied, and the
    list of other settings says so.
    """
    try:
        async with asyncio.timeout(RESPONSE_S):
            found = await _settings(source, topic)
    except Denied as error:
        return SourceSettings(others=[f"all, because they cannot be read: {error.message[:TEXT_CHARS_MAX]}"])
    except TimeoutError:
        raise Unavailable(
            ErrorCode.UNREACHABLE, f"the source did not respond in time topic={topic!r} limit_s={RESPONSE_S:g}"
        ) from None
    if len(found.others) > OTHERS_MAX:
        found.others[OTHERS_MAX:] = [f"{len(found.others) - OTHERS_MAX} further settings"]
    return found


async def _settings(source: WireClient, topic: str) -> SourceSettings:
    match source:
        case PolywireClient():
            return _from_polywire((await source.describe(topic)).settings)
        case KafkaClient():
            return from_kafka(await topic_configs(source, topic))
        case IggyClient():
            found = await source.topic_options(topic)
            return _from_iggy(found.expiry_us, found.size_max, found.partition_count, found.others)
        case _:
            return SourceSettings()


def _from_polywire(settings: Mapping[str, Value]) -> SourceSettings:
    found = SourceSettings()
    for name, value in settings.items():
        if name in _FROM_POLYWIRE:
            found.carried[name] = value
        elif value not in (None, _POLYWIRE_DEFAULTS.get(name)):
            found.others.append(_fact(name, value))
    return found


def from_kafka(configs: Iterable[TopicConfig]) -> SourceSettings:
    """Return the settings of a Kafka topic. Defaults of the cluster become settings of the topic here."""
    found = SourceSettings()
    is_unlimited = False
    for config in configs:
        match config.name:
            case "retention.ms":
                found.carried["retention_age_us"] = _limit(config.value, MILLISECOND_US)
            case "retention.bytes":
                found.carried["retention_bytes"] = _limit(config.value, 1)
            case "cleanup.policy":
                found.carried["compaction"] = int("compact" in config.value)
                is_unlimited = "delete" not in config.value  # Kafka ignores the retention limits of such topics
            case "compression.type" if config.value in _COMPRESSIONS:
                found.carried["compression"] = config.value
            case _ if config.is_set:
                found.others.append(_fact(config.name, config.value))
    if is_unlimited:
        found.carried["retention_age_us"] = found.carried["retention_bytes"] = 0
    return found


def _from_iggy(expiry_us: int, size_max: int, partitions: int, others: Sequence[str]) -> SourceSettings:
    """Return the settings of an Iggy topic. Its size limit is divided among its partitions."""
    carried: dict[str, Value] = {
        "retention_age_us": min(expiry_us, LIMIT_MAX),
        "retention_bytes": min(max(1, size_max // max(1, partitions)), LIMIT_MAX) if size_max else 0,
    }
    return SourceSettings(carried, [text[: 2 * TEXT_CHARS_MAX] for text in others])


def _limit(value: str, scale: int) -> int:
    """Convert a limit of Kafka, where -1 is no limit, to one of the broker, where 0 is no limit."""
    if not value.isascii() or not value.isdigit() or len(value) > len(str(LIMIT_MAX)):
        return 0
    return min(max(1, int(value) * scale), LIMIT_MAX)


def _fact(name: str, value: Value) -> str:
    return f"{name[:TEXT_CHARS_MAX]}={str(value)[:TEXT_CHARS_MAX]}"


def differences(source: Mapping[str, Value], target: Mapping[str, Value]) -> str:
    """Return the settings that differ from those of the source, as ``name=value`` of the source, separated by commas."""
    return ",".join(_fact(name, value) for name, value in sorted(source.items()) if target.get(name) != value)


async def access_notes(source: WireClient) -> list[str]:
    """Return notes about the users and permissions of the source, which links do not carry."""
    if not isinstance(source, KafkaClient):
        return ["users, permissions and access lists of the source are not carried"]
    try:
        rules, users = await acls(source), await scram_users(source)
    except BrokerError as error:
        return [f"users and ACLs of the source are not carried and cannot be listed: {error.message}"]
    notes = [*users_of(rules, users)]
    if len(notes) > LIST_MAX:
        notes[LIST_MAX:] = [f"{len(notes) - LIST_MAX} further users and ACLs of the source are not carried"]
    return notes


def users_of(rules: Sequence[Acl], users: Sequence[str]) -> Iterator[str]:
    """Yield a note with the command for each user, and one for each ACL that has no equivalent permission."""
    by_user: defaultdict[str, list[Acl]] = defaultdict(list)
    for acl in rules:
        by_user[acl.principal].append(acl)
    scram = frozenset(users)
    for name in [*users, *(p.removeprefix(USER) for p in by_user if p.startswith(USER))]:
        own = by_user.pop(f"{USER}{name}", None)
        if own is None and name not in scram:
            continue  # listed already
        words, others = permissions_of(own or [])
        options = " --scram" if name in scram else ""
        permissions = ",".join(words) or "PERMISSIONS"  # an empty list would mean all
        command = f"polywire user add {shlex.quote(name)}{options} --permissions {shlex.quote(permissions)}"
        yield f"user is not carried name={name[:TEXT_CHARS_MAX]!r}: {command}"
        yield from (f"ACL has no equal permission: {_acl_text(acl)}" for acl in others)
        scram -= {name}
    for acl in [acl for left in by_user.values() for acl in left]:
        yield f"ACL has no equal permission: {_acl_text(acl)}"


def permissions_of(rules: Sequence[Acl]) -> tuple[list[str], list[Acl]]:
    """Return the permissions that are equivalent to the ACLs of one user, and the ACLs that have no equivalent."""
    words: dict[str, None] = {}
    others: list[Acl] = []
    topics: dict[int, list[str]] = {READ: [], WRITE: []}
    rest: list[Acl] = []
    for acl in rules:
        where = _where(acl)
        if acl.resource_type != TOPIC:
            rest.append(acl)
        elif acl.permission_type != ALLOW or acl.host != EVERY or where is None or acl.operation not in _WORDS:
            others.append(acl)
        else:
            topics.setdefault(acl.operation, []).append(where)
            words[_WORDS[acl.operation] + where] = None
    for acl in rest:
        added = _other_words(acl, topics)
        if added is None:
            others.append(acl)
        words |= dict.fromkeys(added or ())
    return list(words), others


def _where(acl: Acl) -> str | None:
    """Return the end of a permission, which limits it to a topic or stream. Return None if that is not possible."""
    name = acl.resource_name
    if acl.pattern_type == LITERAL:
        if name == EVERY:
            return ""
        stream, dot, topic = name.partition(".")
        return f"@{stream}/{topic}" if dot else f"@{DEFAULT_STREAM}/{name}"
    if acl.pattern_type == PREFIXED and name.endswith(".") and name.count(".") == 1:
        return f"@{name[:-1]}"
    return None


def _other_words(acl: Acl, topics: Mapping[int, Sequence[str]]) -> list[str] | None:
    """Return the permissions for an ACL of a resource other than a topic; None if there is no equivalent."""
    if acl.permission_type != ALLOW or acl.host != EVERY:
        return None
    if acl.resource_type == CLUSTER and acl.operation in (_WITHOUT_EQUAL, *_CLUSTER_WORDS):
        return [_CLUSTER_WORDS[acl.operation]] if acl.operation in _CLUSTER_WORDS else []
    if (
        acl.resource_type == GROUP
    ):  # here, a group belongs to the user who first uses it, and requires the permission for its topics
        return [f"group{where}" for where in topics.get(READ, ())] or None
    if acl.resource_type == TRANSACTIONAL_ID:
        return [f"transaction{where}" for where in topics.get(WRITE, ())] or None
    return None


def _acl_text(acl: Acl) -> str:
    return (
        f"principal={acl.principal[:TEXT_CHARS_MAX]!r} host={acl.host[:TEXT_CHARS_MAX]!r} "
        f"resource={_RESOURCES.get(acl.resource_type, acl.resource_type)}:{acl.resource_name[:TEXT_CHARS_MAX]!r} "
        f"pattern={'prefixed' if acl.pattern_type == PREFIXED else 'literal'} "
        f"operation={_OPERATIONS.get(acl.operation, acl.operation)} "
        f"permission={'allow' if acl.permission_type == ALLOW else 'deny'}"
    )
