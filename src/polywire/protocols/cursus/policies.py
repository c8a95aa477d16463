"""Topic policies: the arguments of CREATE, and how responses show them (spec: cursus#create).

A policy is stored with its topic. Settings that other protocols have made are shown under their names in Cursus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from polywire.broker.settings import HOUR_US, KEEP, TOPIC_RANGES, TopicSettings
from polywire.broker.topics import Topic, access_list
from polywire.protocols.cursus.context import WIRE
from polywire.protocols.cursus.messages import Refused, Request, integer, quote, words

POLICY_KEYS: Final = words("cleanup_policy retention_hours retention_bytes partitioner auth_policy read_acl write_acl")
LIST_CHARS_MAX: Final = (
    16 * 1024
)  # length of a topic's list of principals, which stays in memory and is checked for every request
UNLIMITED: Final = -1  # the protocol's value for unlimited retention
REPLICATION_FACTOR: Final = 3

_CLEANUPS: Final = {
    "delete": "delete",
    "compact": "compact",
    "delete,compact": "delete,compact",
    "compact,delete": "delete,compact",
}
_PARTITIONERS: Final = frozenset({"hash_key", "round_robin"})
_AUTH_POLICIES: Final = frozenset({"open", "deny_write", "deny_read", "acl"})


class Policy(msgspec.Struct, frozen=True):
    """A topic's settings as Cursus clients see them.

    Attributes:
        retention_hours, retention_bytes: 0 is the broker's default; UNLIMITED retains records forever.
    """

    cleanup_policy: str = "delete"
    partitioner: str = "hash_key"
    auth_policy: str = "open"
    read_acl: str = ""
    write_acl: str = ""
    retention_hours: int = 0
    retention_bytes: int = 0

    def encoded(self) -> str:
        return (
            f"cleanup_policy={self.cleanup_policy} partitioner={self.partitioner} auth_policy={self.auth_policy}"
            f" read_acl={self.read_acl} write_acl={self.write_acl}"
            f" retention_hours={self.retention_hours} retention_bytes={self.retention_bytes}"
        )

    def described(self) -> dict[str, object]:
        """Format the policy for DESCRIBE: cleanup policy, partitioner and auth policy, and other fields if they were
        set.
        """
        shown: dict[str, object] = {
            "cleanup_policy": self.cleanup_policy,
            "partitioner": self.partitioner,
            "auth_policy": self.auth_policy,
        }
        for name in ("retention_hours", "retention_bytes", "read_acl", "write_acl"):
            value = getattr(self, name)
            if value:
                shown[name] = value
        return shown


class _StoredPolicy(msgspec.Struct, omit_defaults=True):
    """The parts of a policy that other protocols do not have, as they are stored with the topic."""

    cleanup_policy: str = "delete"
    partitioner: str = "hash_key"
    auth_policy: str = "open"
    read_acl: str = ""
    write_acl: str = ""


def read_policy(request: Request) -> Policy:
    """Parse the policy of a CREATE. Raises Refused for an invalid value."""
    options = request.options
    cleanup = _choice(options, "cleanup_policy", "delete", _CLEANUPS)
    if cleanup != "delete" and request.is_set("event_sourcing"):
        raise Refused(
            "invalid_topic_policy",
            'field=cleanup_policy reason="compaction is not supported for event-sourcing topics"',
        )
    return Policy(
        cleanup_policy=cleanup,
        partitioner=_choice(options, "partitioner", "hash_key", {name: name for name in _PARTITIONERS}),
        auth_policy=_choice(options, "auth_policy", "open", {name: name for name in _AUTH_POLICIES}),
        read_acl=_list(options, "read_acl"),
        write_acl=_list(options, "write_acl"),
        retention_hours=_limit(options, "retention_hours", TOPIC_RANGES["retention_age_us"].stop // HOUR_US),
        retention_bytes=_limit(options, "retention_bytes", TOPIC_RANGES["retention_bytes"].stop - 1),
    )


def _choice(options: Mapping[str, str], key: str, default: str, known: Mapping[str, str]) -> str:
    given = options.get(key) or default
    chosen = known.get(given.lower())
    if chosen is None:
        shown_name = key.replace("_", " ")
        raise Refused("invalid_topic_policy", f"reason={quote(f'invalid {shown_name} {quote(given)}')}")
    return chosen


def _list(options: Mapping[str, str], key: str) -> str:
    given = options.get(key, "")
    if len(given) > LIST_CHARS_MAX:
        raise Refused("invalid_topic_policy", f"field={key} reason={quote(f'longer than {LIST_CHARS_MAX} characters')}")
    return given


def _limit(options: Mapping[str, str], key: str, most: int) -> int:
    given = options.get(key, "0") or "0"
    value = integer(given)
    if value is None or value < UNLIMITED or value > most:
        raise Refused(f"invalid_{key}", f"value={given}")
    return value


def with_policy(settings: TopicSettings, policy: Policy) -> TopicSettings:
    """Return a topic's settings with this policy. Settings that a policy does not have are unchanged."""
    stored = _StoredPolicy(
        policy.cleanup_policy, policy.partitioner, policy.auth_policy, policy.read_acl, policy.write_acl
    )
    age = _to_broker(policy.retention_hours)
    return replace(
        settings,
        retention_age_us=age and age * HOUR_US,
        retention_bytes=_to_broker(policy.retention_bytes),
        compaction="compact" in policy.cleanup_policy,
        access=access_list(policy.auth_policy, policy.read_acl, policy.write_acl),
        wire_options={**settings.wire_options, WIRE: msgspec.json.encode(stored)},
    )


def policy_of(topic: Topic) -> Policy:
    settings = topic.settings
    value = settings.wire_options.get(WIRE)
    stored = msgspec.json.decode(value, type=_StoredPolicy) if value else _StoredPolicy()
    cleanup = stored.cleanup_policy
    if settings.compaction is not ("compact" in cleanup):
        cleanup = "compact" if settings.compaction else "delete"
    age = settings.retention_age_us
    return Policy(
        cleanup_policy=cleanup,
        partitioner=stored.partitioner,
        auth_policy=stored.auth_policy,
        read_acl=stored.read_acl,
        write_acl=stored.write_acl,
        retention_hours=_to_protocol(age and -(-age // HOUR_US)),
        retention_bytes=_to_protocol(settings.retention_bytes),
    )


def is_governed(topic: Topic) -> bool:
    return WIRE in topic.settings.wire_options


def _to_broker(value: int) -> int | None:
    return None if value == 0 else KEEP if value == UNLIMITED else value


def _to_protocol(value: int | None) -> int:
    return 0 if value is None else UNLIMITED if value == KEEP else value
