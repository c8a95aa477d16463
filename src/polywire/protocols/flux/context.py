"""Settings of the FLUX protocol, and the methods of the broker that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from polywire.broker.groups.commits import PositionVerbs
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.state import WireStateVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.broker.topics import Topic
from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.forwarded import Forwarding

WIRE: Final = "flux"


class FluxBroker(TopicVerbs, RecordVerbs, PositionVerbs, WireStateVerbs, WireBroker, Protocol):
    @property
    def groups(self) -> Coordinator: ...


class FluxRouter(Forwarding, Protocol):
    """The methods of a broker with several processes that FLUX uses."""

    @property
    def is_clogged(self) -> bool:
        """Whether sessions should delay their next request, because a shard has too many unanswered ones."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when ``is_clogged`` becomes False."""

    def wire_state(self, wire: str) -> Mapping[str, bytes]:
        """Return the values that a protocol has stored in the first shard, as far as they are known here."""

    def watch_values(self, changed: Callable[[Any], None]) -> None:
        """Call ``changed`` with each such value that is stored or removed. See ``shards.Parts``."""

    def topics(self) -> list[Topic]:
        """Return the topics of all processes that have reported their topics."""

    def require_latest(self) -> None:
        """Raise Pending until the topics of all processes are known. See ``shards.Parts``."""


@dataclass(frozen=True, slots=True)
class FluxSettings:
    """Settings of FLUX, with the defaults of the original broker (spec: flux#settings).

    broker_id: id of this broker in metadata and roles.
    host: host of this broker in metadata.
    port: port of this broker in metadata.
    replication_factor: default number of replicas of a topic.
    replication_factor_max: maximum number of replicas of a topic.
    min_isr: in-sync replicas that ``acks=all`` needs.
    lag_max: records by which an in-sync follower may be behind.
    lag_timeout_ms: longest time since the last report of an in-sync follower.
    ack_all_timeout_ms: how long ``acks=all`` waits; clients time out after 5 s.
    strict_leaders: create topics without leaders, as the original broker does (spec: flux#our-choices).
    admin: enable ADMIN_* and SET_PARTITION_ROLE (spec: flux#our-choices).
    line_bytes_max: maximum length of a request, including the line ending (spec: flux#framing).
    pipes_in_arguments: accept pipes in the arguments, as the original broker does; the specification allows only the three pipes between the
        four sections.
    reply_bytes_max: maximum size of a response to BROKER_FETCH, and to CONSUME with ``max=`` (spec: flux#values-in-replies). At least one
        record is sent.
    """

    broker_id: int = 0
    host: str = "127.0.0.1"
    port: int = 9092
    replication_factor: int = 3
    replication_factor_max: int = 1_000
    min_isr: int = 2
    lag_max: int = 0
    lag_timeout_ms: int = 10_000
    ack_all_timeout_ms: int = 2_000
    strict_leaders: bool = False
    admin: bool = True
    line_bytes_max: int = LINE_BYTES_MAX
    pipes_in_arguments: bool = True
    reply_bytes_max: int = 8 * 1024 * 1024
