"""The Iggy wire as the server sees it: recognises its connections and opens sessions for them.

Promises: everything that sessions of one broker share is made once. Must not know: sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.broker.actions import Action
from polywire.broker.broker import Broker
from polywire.protocols.iggy import auth, fetch, groups, offsets, produce, server, topics, vsr
from polywire.protocols.iggy.context import IggySettings, Shared
from polywire.protocols.iggy.messages import HEAD, WIRE, Code
from polywire.protocols.iggy.session import FRAME_BYTES_MAX, Command, IggySession
from polywire.protocols.runtime.session import Output

COMMANDS: Final[Mapping[int, Command]] = {
    Code.PING: Command(server.ping, (Action.CONNECT,), bare=True),
    Code.GET_STATS: Command(server.get_stats, (Action.SERVER_DESCRIBE,), bare=True),
    Code.GET_SNAPSHOT: Command(server.refuse, (Action.SERVER_DESCRIBE,)),
    Code.GET_CLUSTER: Command(server.get_cluster, (Action.CLUSTER_DESCRIBE,)),
    Code.DESCRIBE_OPTIONS: Command(topics.describe_options, (Action.CLUSTER_DESCRIBE,)),
    Code.GET_ME: Command(server.get_me, (Action.SELF_DESCRIBE,), bare=True),
    Code.GET_CLIENT: Command(server.get_client, (Action.SERVER_DESCRIBE,)),
    Code.GET_CLIENTS: Command(server.get_clients, (Action.SERVER_DESCRIBE,), bare=True),
    Code.GET_USER: Command(auth.get_user, (Action.SELF_DESCRIBE, Action.USER_DESCRIBE)),
    Code.GET_USERS: Command(auth.get_users, (Action.USER_DESCRIBE,), bare=True),
    Code.CREATE_USER: Command(auth.create_user, (Action.USER_CREATE,)),
    Code.DELETE_USER: Command(auth.delete_user, (Action.USER_DELETE,)),
    Code.UPDATE_USER: Command(auth.update_user, (Action.USER_ALTER,)),
    Code.UPDATE_PERMISSIONS: Command(auth.update_permissions, (Action.USER_ALTER,)),
    Code.CHANGE_PASSWORD: Command(auth.change_password, (Action.SELF_DESCRIBE, Action.USER_ALTER)),
    Code.LOGIN: Command(auth.log_in, (Action.CONNECT,)),
    Code.LOGOUT: Command(auth.log_out, (Action.SELF_DESCRIBE,), bare=True),
    Code.GET_TOKENS: Command(auth.get_tokens, (Action.SELF_DESCRIBE,), bare=True),
    Code.CREATE_TOKEN: Command(auth.create_token, (Action.TOKEN_CREATE,)),
    Code.DELETE_TOKEN: Command(auth.delete_token, (Action.TOKEN_DELETE,)),
    Code.LOGIN_TOKEN: Command(auth.log_in_with_token, (Action.CONNECT,)),
    Code.POLL: Command(fetch.poll, (Action.FETCH, Action.GROUP_JOIN, Action.OFFSET_COMMIT, Action.POSITION_COMMIT)),
    Code.SEND: Command(produce.send, (Action.PRODUCE,), piled=True),
    Code.FLUSH: Command(produce.flush, (Action.PRODUCE,)),
    Code.GET_OFFSET: Command(offsets.get_offset, (Action.OFFSET_FETCH, Action.POSITION_FETCH)),
    Code.STORE_OFFSET: Command(offsets.store_offset, (Action.OFFSET_COMMIT, Action.POSITION_COMMIT)),
    Code.DELETE_OFFSET: Command(offsets.delete_offset, (Action.OFFSET_COMMIT, Action.POSITION_COMMIT)),
    Code.GET_STREAM: Command(topics.get_stream, (Action.STREAM_DESCRIBE,)),
    Code.GET_STREAMS: Command(topics.get_streams, (Action.STREAM_LIST,), bare=True),
    Code.CREATE_STREAM: Command(topics.create_stream, (Action.STREAM_CREATE,)),
    Code.DELETE_STREAM: Command(topics.delete_stream, (Action.STREAM_DELETE,)),
    Code.UPDATE_STREAM: Command(topics.update_stream, (Action.STREAM_ALTER,)),
    Code.PURGE_STREAM: Command(topics.purge_stream, (Action.STREAM_ALTER,)),
    Code.GET_TOPIC: Command(topics.get_topic, (Action.TOPIC_DESCRIBE,)),
    Code.GET_TOPICS: Command(topics.get_topics, (Action.TOPIC_DESCRIBE,)),
    Code.CREATE_TOPIC: Command(topics.create_topic, (Action.TOPIC_CREATE,)),
    Code.DELETE_TOPIC: Command(topics.delete_topic, (Action.TOPIC_DELETE,)),
    Code.UPDATE_TOPIC: Command(topics.update_topic, (Action.TOPIC_ALTER,)),
    Code.PURGE_TOPIC: Command(topics.purge_topic, (Action.TOPIC_PURGE,)),
    Code.CREATE_PARTITIONS: Command(topics.create_partitions, (Action.TOPIC_ALTER,)),
    Code.DELETE_PARTITIONS: Command(topics.delete_partitions, (Action.TOPIC_ALTER,)),
    Code.DELETE_SEGMENTS: Command(topics.delete_segments, (Action.TOPIC_PURGE,)),
    Code.GET_GROUP: Command(groups.get_group, (Action.GROUP_DESCRIBE,)),
    Code.GET_GROUPS: Command(groups.get_groups, (Action.GROUP_DESCRIBE,)),
    Code.CREATE_GROUP: Command(groups.create_group, (Action.GROUP_CREATE,)),
    Code.DELETE_GROUP: Command(groups.delete_group, (Action.GROUP_DELETE,)),
    Code.JOIN_GROUP: Command(groups.join_group, (Action.GROUP_JOIN,)),
    Code.LEAVE_GROUP: Command(groups.leave_group, (Action.GROUP_JOIN,)),
    Code.SYNC_GROUP: Command(groups.sync_group, (Action.GROUP_JOIN,)),
}


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
        """Whether this is a classic request of a known command, or begins with the zeros of the headered framing.

        spec: iggy#recognising-the-framing
        """
        if len(prefix) < HEAD.size:
            length = int.from_bytes(prefix[:4].ljust(4, b"\xff"), "little")
            return None if len(prefix) < 4 or length == 0 or 4 <= length <= FRAME_BYTES_MAX else False
        length, code = HEAD.unpack_from(prefix)
        if length != 0:
            return 4 <= length <= FRAME_BYTES_MAX and code in COMMANDS
        if any(prefix[:48]):
            return False
        if len(prefix) < 61:
            return None
        return prefix[60] == vsr.REQUEST

    def open(self, output: Output, resume: Callable[[], None]) -> IggySession:
        """A session for a new connection."""
        return IggySession(self.shared, COMMANDS, output, resume)
