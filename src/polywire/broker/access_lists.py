"""Access lists as earlier releases kept them: among the options that only the Cursus wire understood.

Promises: a directory written before access lists counted on every wire restricts on every wire what it restricted on one. Must not know:
topics, who asks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from polywire.broker.settings import AccessList, TopicSettings

KEPT_UNDER: Final = "cursus"


class _Policy(msgspec.Struct):
    auth_policy: str = "open"
    read_acl: str = ""
    write_acl: str = ""


def access_list(auth_policy: str, read_acl: str, write_acl: str) -> AccessList | None:
    """What a policy's words mean; None when they restrict nobody. An unknown word lets nobody in."""
    match auth_policy:
        case "open":
            return None
        case "deny_read":
            return AccessList(readers=())
        case "deny_write":
            return AccessList(writers=())
        case "acl":
            return AccessList(tuple(read_acl.split(",")), tuple(write_acl.split(",")))
        case _:
            return AccessList((), ())


def upgraded(settings: TopicSettings) -> TopicSettings:
    """Settings with their access list, wherever it was kept. Options that cannot be read let nobody in."""
    stored = settings.wire_options.get(KEPT_UNDER)
    if settings.access is not None or not stored:
        return settings
    try:
        kept = msgspec.json.decode(stored, type=_Policy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return replace(settings, access=AccessList((), ()))
    found = access_list(kept.auth_policy, kept.read_acl, kept.write_acl)
    return settings if found is None else replace(settings, access=found)
