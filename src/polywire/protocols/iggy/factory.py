"""The entry point of the Iggy protocol: detect Iggy connections and create their sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.broker.permissions import Action
from polywire.protocols.iggy import auth, fetch, groups, held_polls, histories, offsets, produce, server, topics, vsr
from polywire.protocols.iggy.context import CLIENTS_PART, IggyBroker, IggySettings, Shared
from polywire.protocols.iggy.messages import HEAD, WIRE, Code
from polywire.protocols.iggy.routed import FUNCTIONS
from polywire.protocols.iggy.session import FRAME_BYTES_MAX, Command, IggySession
from polywire.protocols.runtime.commands import table
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Called, Parts

POLLING: Final = (Action.FETCH, Action.GROUP_JOIN, Action.OFFSET_COMMIT, Action.POSITION_COMMIT)
COMMANDS: Final[Mapping[int, Command]] = table(
    Command(Code.PING, server.ping, (Action.CONNECT,), empty=True),
    Command(Code.GET_STATS, server.get_stats, (Action.SERVER_DESCRIBE,), empty=True),
    Command(Code.GET_SNAPSHOT, server.refuse, (Action.SERVER_DESCRIBE,)),
    Command(Code.GET_CLUSTER, server.get_cluster, (Action.CLUSTER_DESCRIBE,)),
    Command(Code.DESCRIBE_OPTIONS, topics.describe_options, (Action.CLUSTER_DESCRIBE,)),
    Command(Code.GET_ME, server.get_me, (Action.SELF_DESCRIBE,), empty=True),
    Command(Code.GET_CLIENT, server.get_client, (Action.SERVER_DESCRIBE,)),
    Command(Code.GET_CLIENTS, server.get_clients, (Action.SERVER_DESCRIBE,), empty=True),
    Command(Code.GET_USER, auth.get_user, (Action.SELF_DESCRIBE, Action.USER_DESCRIBE)),
    Command(Code.GET_USERS, auth.get_users, (Action.USER_DESCRIBE,), empty=True),
    Command(Code.CREATE_USER, auth.create_user, (Action.USER_CREATE,)),
    Command(Code.DELETE_USER, auth.delete_user, (Action.USER_DELETE,)),
    Command(Code.UPDATE_USER, auth.update_user, (Action.USER_ALTER,)),
    Command(Code.UPDATE_PERMISSIONS, auth.update_permissions, (Action.USER_ALTER,)),
    Command(Code.CHANGE_PASSWORD, auth.change_password, (Action.SELF_DESCRIBE, Action.USER_ALTER)),
    Command(Code.LOGIN, auth.log_in, (Action.CONNECT,)),
    Command(Code.LOGOUT, auth.log_out, (Action.SELF_DESCRIBE,), empty=True),
    Command(Code.GET_TOKENS, auth.get_tokens, (Action.SELF_DESCRIBE,), empty=True),
    Command(Code.CREATE_TOKEN, auth.create_token, (Action.TOKEN_CREATE,)),
    Command(Code.DELETE_TOKEN, auth.delete_token, (Action.TOKEN_DELETE,)),
    Command(Code.LOGIN_TOKEN, auth.log_in_with_token, (Action.CONNECT,)),
    Command(Code.POLL, fetch.poll, POLLING),
    Command(Code.POLL_HELD, held_polls.poll_held, POLLING, today=True, held=True),
    Command(Code.AWAIT, held_polls.await_messages, (Action.FETCH, Action.GROUP_JOIN), today=True, held=True),
    Command(Code.FETCH, held_polls.fetch_messages, POLLING, today=True, held=True),
    Command(Code.GET_ROUTE, histories.get_route, (Action.TOPIC_DESCRIBE,), today=True),
    Command(Code.SEND, produce.send, (Action.PRODUCE,), pipelined=True),
    Command(Code.FLUSH, produce.flush, (Action.PRODUCE,)),
    Command(Code.GET_OFFSET, offsets.get_offset, (Action.OFFSET_FETCH, Action.POSITION_FETCH)),
    Command(Code.STORE_OFFSET, offsets.store_offset, (Action.OFFSET_COMMIT, Action.POSITION_COMMIT)),
    Command(Code.DELETE_OFFSET, offsets.delete_offset, (Action.OFFSET_COMMIT, Action.POSITION_COMMIT)),
    Command(Code.GET_STREAM, topics.get_stream, (Action.STREAM_DESCRIBE,)),
    Command(Code.GET_STREAMS, topics.get_streams, (Action.STREAM_LIST,), empty=True),
    Command(Code.CREATE_STREAM, topics.create_stream, (Action.STREAM_CREATE,)),
    Command(Code.DELETE_STREAM, topics.delete_stream, (Action.STREAM_DELETE,)),
    Command(Code.UPDATE_STREAM, topics.update_stream, (Action.STREAM_ALTER,)),
    Command(Code.PURGE_STREAM, topics.purge_stream, (Action.STREAM_ALTER,)),
    Command(Code.GET_TOPIC, topics.get_topic, (Action.TOPIC_DESCRIBE,)),
    Command(Code.GET_TOPICS, topics.get_topics, (Action.TOPIC_DESCRIBE,)),
    Command(Code.CREATE_TOPIC, topics.create_topic, (Action.TOPIC_CREATE,)),
    Command(Code.DELETE_TOPIC, topics.delete_topic, (Action.TOPIC_DELETE,)),
    Command(Code.UPDATE_TOPIC, topics.update_topic, (Action.TOPIC_ALTER,)),
    Command(Code.PURGE_TOPIC, topics.purge_topic, (Action.TOPIC_PURGE,)),
    Command(Code.CREATE_PARTITIONS, topics.create_partitions, (Action.TOPIC_ALTER,)),
    Command(Code.DELETE_PARTITIONS, topics.delete_partitions, (Action.TOPIC_ALTER,)),
    Command(Code.DELETE_SEGMENTS, topics.delete_segments, (Action.TOPIC_PURGE,)),
    Command(Code.GET_GROUP, groups.get_group, (Action.GROUP_DESCRIBE,)),
    Command(Code.GET_GROUPS, groups.get_groups, (Action.GROUP_DESCRIBE,)),
    Command(Code.CREATE_GROUP, groups.create_group, (Action.GROUP_CREATE,)),
    Command(Code.DELETE_GROUP, groups.delete_group, (Action.GROUP_DELETE,)),
    Command(Code.JOIN_GROUP, groups.join_group, (Action.GROUP_JOIN,)),
    Command(Code.LEAVE_GROUP, groups.leave_group, (Action.GROUP_JOIN,)),
    Command(Code.SYNC_GROUP, groups.sync_group, (Action.GROUP_JOIN,)),
)
CLASSIC: Final = frozenset(code for code, command in COMMANDS.items() if not command.today)
"""Commands of the classic framing, by number."""


class IggyFactory:
    """Opens sessions of the Iggy protocol. Implements ``protocols.runtime.session.SessionFactory``."""

    __slots__ = ("_commands", "shared")

    def __init__(self, broker: IggyBroker, settings: IggySettings | None = None, *, parts: Parts | None = None) -> None:
        """``parts`` are all processes, if there are several. Then ``broker`` has the topics of all of them."""
        self.shared: Final = Shared(broker, settings or IggySettings(), parts)
        self._commands: Final = COMMANDS

    @property
    def wire(self) -> str:
        return WIRE

    @property
    def called(self) -> Called:
        """Objects of this process that other processes call."""
        functions = Shared.list_clients, Shared.count, fetch.execute_poll
        return (WIRE, self.shared.inside.directory, FUNCTIONS), (CLIENTS_PART, self.shared, functions)

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether the bytes begin an Iggy request, in the older format or in that with a header of 256 bytes.

        A request in the older format must have a known command. The newer one begins with zeros. Returns None if more
        bytes are needed (spec: iggy#recognising-the-framing).
        """
        if len(prefix) < HEAD.size:
            length = int.from_bytes(prefix[:4].ljust(4, b"\xff"), "little")
            return None if len(prefix) < 4 or length == 0 or 4 <= length <= FRAME_BYTES_MAX else False
        length, code = HEAD.unpack_from(prefix)
        if length != 0:
            return 4 <= length <= FRAME_BYTES_MAX and code in CLASSIC
        if any(prefix[:48]):
            return False
        if len(prefix) < 61:
            return None
        return prefix[60] == vsr.REQUEST

    def open(self, output: Output, resume: Callable[[], None]) -> IggySession:
        return IggySession(self.shared, self._commands, output, resume)
