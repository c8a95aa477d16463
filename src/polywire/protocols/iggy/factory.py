"""The Iggy wire as the server sees it: recognises its connections and opens sessions for them.

Promises: everything that sessions of one broker share is made once. Must not know: sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.broker.broker import Broker
from polywire.protocols.base import Output
from polywire.protocols.iggy import groups, records, streams, system, users, vsr
from polywire.protocols.iggy.messages import HEAD, WIRE, Code
from polywire.protocols.iggy.session import Command, IggySession
from polywire.protocols.iggy.shared import IggySettings, Shared

COMMANDS: Final[Mapping[int, Command]] = {
    Code.PING: Command(system.ping, anonymous=True),
    Code.GET_STATS: Command(system.get_stats),
    Code.GET_SNAPSHOT: Command(system.refuse),
    Code.GET_CLUSTER: Command(system.get_cluster),
    Code.DESCRIBE_OPTIONS: Command(system.describe_options),
    Code.GET_ME: Command(system.get_me),
    Code.GET_CLIENT: Command(system.get_client),
    Code.GET_CLIENTS: Command(system.get_clients),
    Code.GET_USER: Command(users.get_user),
    Code.GET_USERS: Command(users.get_users),
    Code.CREATE_USER: Command(users.create_user),
    Code.DELETE_USER: Command(users.delete_user),
    Code.UPDATE_USER: Command(users.update_user),
    Code.UPDATE_PERMISSIONS: Command(users.update_permissions),
    Code.CHANGE_PASSWORD: Command(users.change_password),
    Code.LOGIN: Command(system.log_in, anonymous=True),
    Code.LOGOUT: Command(system.log_out),
    Code.GET_TOKENS: Command(users.get_tokens),
    Code.CREATE_TOKEN: Command(users.create_token),
    Code.DELETE_TOKEN: Command(users.delete_token),
    Code.LOGIN_TOKEN: Command(system.log_in_with_token, anonymous=True),
    Code.POLL: Command(records.poll),
    Code.SEND: Command(records.send, piled=True),
    Code.FLUSH: Command(records.flush),
    Code.GET_OFFSET: Command(records.get_offset),
    Code.STORE_OFFSET: Command(records.store_offset),
    Code.DELETE_OFFSET: Command(records.delete_offset),
    Code.GET_STREAM: Command(streams.get_stream),
    Code.GET_STREAMS: Command(streams.get_streams),
    Code.CREATE_STREAM: Command(streams.create_stream),
    Code.DELETE_STREAM: Command(streams.delete_stream),
    Code.UPDATE_STREAM: Command(streams.update_stream),
    Code.PURGE_STREAM: Command(streams.purge_stream),
    Code.GET_TOPIC: Command(streams.get_topic),
    Code.GET_TOPICS: Command(streams.get_topics),
    Code.CREATE_TOPIC: Command(streams.create_topic),
    Code.DELETE_TOPIC: Command(streams.delete_topic),
    Code.UPDATE_TOPIC: Command(streams.update_topic),
    Code.PURGE_TOPIC: Command(streams.purge_topic),
    Code.CREATE_PARTITIONS: Command(streams.create_partitions),
    Code.DELETE_PARTITIONS: Command(streams.delete_partitions),
    Code.DELETE_SEGMENTS: Command(streams.delete_segments),
    Code.GET_GROUP: Command(groups.get_group),
    Code.GET_GROUPS: Command(groups.get_groups),
    Code.CREATE_GROUP: Command(groups.create_group),
    Code.DELETE_GROUP: Command(groups.delete_group),
    Code.JOIN_GROUP: Command(groups.join_group),
    Code.LEAVE_GROUP: Command(groups.leave_group),
    Code.SYNC_GROUP: Command(groups.sync_group),
}

_FIRST_BYTES_MAX: Final = (
    1024 * 1024
)  # of a classic first request: a login, a question, or what a small client sends at once


class IggyFactory:
    """Implements ``protocols.base.SessionFactory``."""

    __slots__ = ("shared",)

    def __init__(self, broker: Broker, settings: IggySettings | None = None) -> None:
        self.shared: Final = Shared(broker, settings or IggySettings())

    @property
    def wire(self) -> str:
        """Name of the wire."""
        return WIRE

    def recognise(self, prefix: bytes) -> bool | None:
        """Whether this is a classic request of a known command, or begins with the zeros of the headered framing (dossier §9.1)."""
        if len(prefix) < HEAD.size:
            length = int.from_bytes(prefix[:4].ljust(4, b"\xff"), "little")
            return None if len(prefix) < 4 or length == 0 or 4 <= length <= _FIRST_BYTES_MAX else False
        length, code = HEAD.unpack_from(prefix)
        if length != 0:
            return 4 <= length <= _FIRST_BYTES_MAX and code in COMMANDS
        if any(prefix[:48]):
            return False
        if len(prefix) < 61:
            return None
        return prefix[60] == vsr.REQUEST

    def open(self, output: Output, resume: Callable[[], None]) -> IggySession:
        """A session for a new connection."""
        return IggySession(self.shared, COMMANDS, output, resume)
