"""HELP, PROTOCOL_INFO, NEGOTIATE, EXIT, SETGROUP, and cluster commands, which are rejected.

(spec: cursus#conversation, cursus#setgroup-and-exit, cursus#cluster-commands)
"""

from __future__ import annotations

from typing import Final

from polywire.broker.permissions import Action
from polywire.matching import DIGITS, LOWER, consists_of
from polywire.protocols.cursus.messages import Dialect, Refused, Request, encoded, integer, quote
from polywire.protocols.cursus.session import Command, CursusSession, Reply

VERSION: Final = 1
FEATURES: Final = (
    "event_sourcing_v1",
    "idempotent_producer_v1",
    "offset_resume_v1",
    "stream_control_v1",
    "structured_errors_v1",
    "topic_compaction_v1",
)
FEATURES_MAX: Final = 64
FEATURES_BYTES_MAX: Final = 4096

FEATURE_BYTES_MAX: Final = 64
_FEATURE: Final = LOWER + DIGITS + "_"
_ERROR_CLASSES: Final = "authorization,availability,conflict,fencing,internal,not_found,routing,validation"
_HELP: Final = (
    "OK commands=CREATE,DELETE,LIST,PUBLISH,CONSUME,STREAM,JOIN_GROUP,SYNC_GROUP,LEAVE_GROUP,HEARTBEAT,COMMIT_OFFSET,BATCH_COMMIT,"
    "FETCH_OFFSET,LIST_OFFSETS,INIT_PRODUCER_ID,BEGIN_TXN,TXN_PUBLISH,SEND_OFFSETS_TO_TXN,END_TXN,TXN_STATUS,REGISTER_GROUP,GROUP_STATUS,"
    "LIST_GROUPS,DESCRIBE,APPEND_STREAM,READ_STREAM,SAVE_SNAPSHOT,READ_SNAPSHOT,STREAM_VERSION,METADATA,FIND_COORDINATOR,PROTOCOL_INFO,"
    "NEGOTIATE,LIST_CLUSTER,CLUSTER_STATUS,ELECT_LEADER,HELP,EXIT"
)
_LEGACY_HELP: Final = """Available commands:
  CREATE <topic> [<partitions>] - create topic (default=4)
  DELETE <topic>                - delete topic
  LIST                          - list all topics
  SUBSCRIBE <topic>             - subscribe to an existing topic
  PUBLISH <topic> <message>     - publish a message
  CONSUME <topic> <pID> <offset> - consume messages (streaming)
  HELP                          - show this help message
  EXIT                          - exit"""


def show_help(session: CursusSession, request: Request, /) -> Reply:
    if request.dialect is Dialect.LEGACY:
        return encoded(_LEGACY_HELP)
    _stand_alone(request)
    return encoded(_HELP)


def protocol_info(session: CursusSession, request: Request, /) -> Reply:
    _stand_alone(request)
    version = f"min_version={VERSION} max_version={VERSION} default_version={VERSION}"
    return encoded(f"OK protocol=cursus {version} features={','.join(FEATURES)} error_classes={_ERROR_CLASSES}")


def _stand_alone(request: Request) -> None:
    if request.arguments and request.dialect is Dialect.MODERN:
        raise Refused("unknown_command", f"command={quote(request.text)}")


def negotiate(session: CursusSession, request: Request, /) -> Reply:
    """NEGOTIATE: replace the features of this connection. If the request is rejected, they stay the same.

    Errors always have the error class, even if ``structured_errors_v1`` was not negotiated.
    """
    given = request.options.get("version", "")
    if not given:
        raise _negotiation("missing_protocol_version", "command=NEGOTIATE")
    version = integer(given)
    if version is None:
        raise _negotiation("invalid_protocol_version", f"requested={quote(given)}")
    if version != VERSION:
        raise _negotiation("UNSUPPORTED_PROTOCOL_VERSION", f"requested={version} min={VERSION} max={VERSION}")
    requested = _features(request.options.get("features", ""))
    required = request.options.get("require_features", "false").lower()
    if required not in ("true", "false"):
        raise _negotiation("invalid_require_features", f"value={quote(request.options['require_features'])}")
    unsupported = sorted(requested - set(FEATURES))
    if unsupported and required == "true":
        raise _negotiation("UNSUPPORTED_FEATURE", f"features={','.join(unsupported)}")
    session.features = frozenset(requested & set(FEATURES))
    enabled = ",".join(sorted(session.features))
    return encoded(f"OK protocol_version={VERSION} enabled={enabled} unsupported={','.join(unsupported)}")


def _features(text: str) -> set[str]:
    if text == "*":
        return set(FEATURES)
    names = [name for name in text.split(",") if name]
    if len(names) > FEATURES_MAX or len(text) > FEATURES_BYTES_MAX:
        reason = f"at most {FEATURES_MAX} names and {FEATURES_BYTES_MAX} bytes"
        raise _negotiation("invalid_protocol_features", f"reason={quote(reason)}")
    for name in names:
        if len(name) > FEATURE_BYTES_MAX or not consists_of(name, _FEATURE):
            raise _negotiation("invalid_protocol_features", f"reason={quote(f'invalid feature name {quote(name)}')}")
    return set(names)


def _negotiation(code: str, facts: str) -> Refused:
    return Refused(code, f"class=validation retryable=false {facts}", classed=True)


def leave(session: CursusSession, request: Request, /) -> Reply:
    """EXIT: close the connection without a response."""
    session.end()
    return ()


def set_group(session: CursusSession, request: Request, /) -> Reply:
    group = request.options.get("group", "")
    if not group:
        raise Refused("missing_group", "command=SETGROUP", legacy="missing group name")
    session.group = group
    return encoded(f"\u2705 Consumer group set to '{group}'")


def list_cluster(session: CursusSession, request: Request, /) -> Reply:
    """LIST_CLUSTER: rejected, because Cursus clients see a broker without a cluster."""
    raise Refused("distribution_not_enabled")


def no_cluster(session: CursusSession, request: Request, /) -> Reply:
    """CLUSTER_STATUS and ELECT_LEADER: rejected, because Cursus clients see a broker without a cluster."""
    raise Refused("distribution_required", f"command={request.name}")


COMMANDS: Final = (
    Command("HELP", show_help, (Action.CONNECT,), alone=True),
    Command("PROTOCOL_INFO", protocol_info, (Action.CONNECT,), alone=True),
    Command("NEGOTIATE", negotiate, (Action.CONNECT,), alone=True),
    Command("EXIT", leave, (Action.CONNECT,), alone=True),
    Command("SETGROUP", set_group, (Action.GROUP_LIST,)),
    Command("LIST_CLUSTER", list_cluster, (Action.SERVER_DESCRIBE,), alone=True),
    Command("CLUSTER_STATUS", no_cluster, (Action.SERVER_DESCRIBE,), alone=True),
    Command("ELECT_LEADER", no_cluster, (Action.CLUSTER_ALTER,)),
)
