"""What is settled for the FLUX wire of one broker: its name, its settings, and what it calls of the broker.

Promises: the defaults are those of the reference, where it has such a setting. Must not know: sessions, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.positions import PositionVerbs
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.broker.wire_state import WireStateVerbs
from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from polywire.protocols.runtime.broker import WireBroker

WIRE: Final = "flux"


class FluxBroker(TopicVerbs, RecordVerbs, PositionVerbs, WireStateVerbs, WireBroker, Protocol):
    """What this wire calls of the broker."""

    @property
    def groups(self) -> Coordinator:
        """Groups and their members."""


@dataclass(frozen=True, slots=True)
class FluxSettings:
    """Settings of the wire, with the reference's defaults (spec: flux#settings).

    broker_id: of this broker in metadata and roles.
    host, port: where metadata say that it listens.
    replication_factor, replication_factor_max: of a topic that is given none, and the most one may be given; its replicas are listed.
    min_isr: replicas in sync that ``acks=all`` needs.
    lag_max, lag_timeout_ms: records and time that a follower may be behind and still count as in sync.
    ack_all_timeout_ms: of ``acks=all``; clients give up after 5 s, so this stays well below.
    strict_leaders: whether created topics begin without leaders, as in the reference (spec: flux#our-choices).
    admin: whether ADMIN_* and SET_PARTITION_ROLE are known (spec: flux#our-choices).
    line_bytes_max: of a request, its line ending included (spec: flux#framing).
    pipes_in_arguments: whether what follows the third pipe may hold more of them, as in the reference; the page has four sections.
    reply_bytes_max: of one reply to BROKER_FETCH, and to CONSUME where ``max=`` limits it
        (spec: flux#values-in-replies); one record is always sent.
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
