"""Convert access lists that earlier releases stored among the options of the Cursus protocol.

A converted access list applies to all protocols, not only to Cursus.
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
    """Return the access list for a policy, None if it restricts nothing. A policy with an unknown value denies
    everyone.
    """
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
    """Return the settings with the access list in its present field, wherever it was stored. Unreadable options deny
    everyone.
    """
    stored = settings.wire_options.get(KEPT_UNDER)
    if settings.access is not None or not stored:
        return settings
    try:
        kept = msgspec.json.decode(stored, type=_Policy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return replace(settings, access=AccessList((), ()))
    found = access_list(kept.auth_policy, kept.read_acl, kept.write_acl)
    return settings if found is None else replace(settings, access=found)
