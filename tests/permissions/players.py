"""One connection of each protocol over a broker with users, and the meaning of its responses for permissions.

The sessions are real; a request that was not understood is an error of the suite and raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from polywire.broker.access import ConfiguredUser, Principal
from polywire.broker.broker import Broker
from polywire.broker.owners import Caller
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING, Action, Grants, parse_grants
from polywire.broker.settings import TopicSettings
from polywire.errors import Denied, ErrorCode
from polywire.http.errors import CATALOG
from polywire.protocols.iggy.context import IggySettings
from polywire.protocols.iggy.messages import Code
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.codec import decode_request
from polywire.protocols.kafka.messages import SERVED, Api, WireError
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Verb
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, TopicName
from tests.permissions.cases import SECRET, TOPIC, Case, Outcome, Player
from tests.unit.http.site import Site
from tests.unit.protocols.cursus import dialogue as cursus
from tests.unit.protocols.cursus.test_produce import batch
from tests.unit.protocols.cursus.test_produce import messages as cursus_messages
from tests.unit.protocols.flux import dialogue as flux
from tests.unit.protocols.iggy import dialogue as iggy
from tests.unit.protocols.kafka import dialogue as kafka
from tests.unit.protocols.kafka.requests import (
    GROUP,
    TOPIC_ID,
    authenticate_frame,
    beat_frame,
    join_frame,
    open_frame,
    share_frames,
)
from tests.unit.protocols.kafka07 import dialogue as kafka07
from tests.unit.protocols.polywire.peer import Peer, batch_of

WAIT_S_MAX: Final = 60.0
REBALANCE_S: Final = 30.0  # more than a member of a Kafka group may take to return
HASH: Final = hash_password("password")
GRANTS: Final[Mapping[str, Grants]] = {
    "admin": EVERYTHING,
    "other": parse_grants(["manage_streams@foreign"]),
    "anonymous": Grants(),
    "tenant": parse_grants(["manage_streams@shop"]),
}
NAMES: Final = {Player.OTHER: "other", Player.TENANT: "tenant", Player.ADMIN: "admin"}
REFUSED: Final = {
    WireError.TOPIC_AUTHORIZATION_FAILED,
    WireError.GROUP_AUTHORIZATION_FAILED,
    WireError.CLUSTER_AUTHORIZATION_FAILED,
    WireError.ILLEGAL_SASL_STATE,
}
HIDDEN: Final = {WireError.UNKNOWN_MEMBER_ID, WireError.GROUP_ID_NOT_FOUND}
"""Errors for a group that the caller may not use, as for a missing one."""
TENANT_ID: Final = list(GRANTS).index("tenant") + 1
OWN_TOPIC_ID: Final = b"id of foreign.own"[:16]
STAGED: Final = b"staged by tenant"


def furnish(broker: Broker, run: Callable[[], None], *, has_tenant: bool = True) -> dict[Player, str]:
    """Create users and the resources of both tenants; return the players' access tokens."""
    broker.create_topic(TopicName("foreign", "own"), 1)
    if has_tenant:
        topic = broker.create_topic(TopicName("shop", "orders"), 2)
        broker.create_topic(TopicName("shop", "events"), 1, TopicSettings(event_sourcing=True))
        broker.produce(topic.partitions[0], from_records([Record(SECRET)]), level=Level.WRITTEN, done=None)
        broker.groups.create("g", TOPIC)
        broker.shares.configure("workers", topic, {}, done=lambda _: None)
        owner = Caller(Principal(TENANT_ID, "tenant"), TENANT_ID)
        broker.transactions.begin_epoch("held", by=owner, done=None)
        broker.publish("held", 1, [], by=owner, done=None)
        broker.stage(STAGED, topic.partitions[0], batch_of(b"staged"), level=Level.WRITTEN, done=None)
    names = [name for name in GRANTS if has_tenant or name != "tenant"]
    broker.access.configure([ConfiguredUser(name, HASH, GRANTS[name]) for name in names])
    tokens = {
        player: broker.access.create_token(broker.access.user(name), "matrix", None)
        for player, name in NAMES.items()
        if name in names
    }
    run()
    return tokens


def play(case: Case, player: Player, *, has_tenant: bool = True) -> tuple[Outcome, bytes]:
    """Run one case; return the outcome and the response. has_tenant: whether the tenant exists."""
    return _PLAYS[case.wire](case, player, has_tenant)


def _polywire(case: Case, player: Player, has_tenant: bool) -> tuple[Outcome, bytes]:
    memory = MemoryBroker()
    tokens = furnish(memory.broker, memory.run, has_tenant=has_tenant)
    assert isinstance(memory.loop, ManualLoop)
    peer = Peer(broker=memory.broker, loop=memory.loop)
    if player in NAMES:
        assert not peer.ask(Verb.LOGIN, messages.LogIn(NAMES[player], tokens[player])).flags & 2
    assert isinstance(case.request, tuple)
    verb, head, payload = case.request
    if isinstance(head, messages.LogIn):
        head = messages.LogIn("admin", tokens[Player.ADMIN])
    answer = peer.ask(verb, head, payload)
    if not answer.flags & 2:
        return Outcome.YES, answer.head + answer.payload
    assert answer.error.code is not ErrorCode.INVALID_REQUEST, answer.error
    return Outcome.NO if isinstance(answer.error, Denied) else Outcome.YES, answer.error.message.encode()


def _cursus(case: Case, player: Player, has_tenant: bool) -> tuple[Outcome, bytes]:
    world = cursus.World()
    tokens = furnish(world.memory.broker, world.memory.run, has_tenant=has_tenant)
    peer = world.connect()
    if player in NAMES:
        assert peer.ask(f"AUTH principal={NAMES[player]} token={tokens[player]}").startswith("OK")
    assert isinstance(case.request, bytes)
    body = case.request.replace(b"admin-token", tokens[Player.ADMIN].encode())
    if case.command == "a batch":
        body = batch(TOPIC, 0, cursus_messages(1))
    answer = b"\n".join(peer.say(body))
    for fault in (b"missing_", b"invalid_", b"unknown_command", b"syntax"):
        assert fault not in answer.partition(b" reason=")[0], answer
    refused = b"NOT_AUTHORIZED" in answer or b"authentication_" in answer
    return Outcome.NO if refused else Outcome.YES, answer


def _flux(case: Case, player: Player, has_tenant: bool) -> tuple[Outcome, bytes]:
    world = flux.World()
    furnish(world.memory.broker, world.memory.run, has_tenant=has_tenant)
    peer = world.connect()
    if player in NAMES:
        peer.certified = world.memory.broker.access.certified(NAMES[player])
    assert isinstance(case.request, bytes)
    answer = peer.exchange(case.request)
    assert b"requires:" not in answer, answer
    assert b"requires no args" not in answer, answer
    assert b"UNKNOWN_COMMAND" not in answer, answer
    return Outcome.NO if b"not allowed" in answer else Outcome.YES, answer


def _http(case: Case, player: Player, has_tenant: bool) -> tuple[Outcome, bytes]:
    site = Site()
    try:
        tokens = furnish(site.broker, site.broker.commit, has_tenant=has_tenant)
        if has_tenant and case.action in (Action.USER_ALTER, Action.USER_DELETE):
            site.make_user("made", "password")
        assert isinstance(case.request, bytes)
        line, _, rest = case.request.partition(b"\r\n")
        login = b"Authorization: Bearer %s\r\n" % tokens[player].encode() if player in NAMES else b""
        answer = site.exchange(line + b"\r\n" + login + rest)
    finally:
        site.close()
    # no table is written here, and no query is running, so that a permitted request finds none
    permitted = (200, 404) if CATALOG in case.command or "{query}" in case.command else (200,)
    assert answer.status in (*permitted, 401, 403) or case.action is Action.CONNECT, answer
    return Outcome.YES if answer.status in permitted else Outcome.NO, b"%d " % answer.status + answer.body


def _make_user(world: iggy.World) -> None:
    """Create a user that can be changed over a protocol; configured users cannot."""
    made: list[object] = []
    world.memory.broker.access.create_user("made", "password", None, done=made.append)
    end = time.monotonic() + WAIT_S_MAX
    while not made:
        assert time.monotonic() < end
        time.sleep(0.001)
        world.memory.run()


def _iggy_today(case: Case, player: Player, has_tenant: bool) -> tuple[Outcome, bytes]:
    """Run a case as a client of protocol 0.12."""
    world = iggy.World()
    tokens = furnish(world.memory.broker, world.memory.run, has_tenant=has_tenant)
    peer = world.connect()
    if player in NAMES:
        token = tokens[player].encode()
        who = (12 << 10).to_bytes(4, "little") + b"\x01s\x011" + bytes(32) + bytes((len(token),)) + token + bytes(4)
        assert peer.headered(1, who)[0] == 0
    assert isinstance(case.request, bytes)
    answer = peer.ask(case.request)
    assert answer[60] == 8, "no eviction"
    status = int.from_bytes(answer[216:220], "little")
    assert status != 3, "the request cannot be decoded"
    return Outcome.NO if status in (40, 41) else Outcome.YES, answer[256:]


def _iggy(case: Case, player: Player, has_tenant: bool) -> tuple[Outcome, bytes]:
    if isinstance(case.request, bytes) and not any(case.request[:4]):
        return _iggy_today(case, player, has_tenant)
    world = iggy.World(iggy=IggySettings(dialect="0.8"))
    tokens = furnish(world.memory.broker, world.memory.run, has_tenant=has_tenant)
    peer = world.connect()
    if player in NAMES:
        token = tokens[player].encode()
        assert peer.classic(Code.LOGIN_TOKEN, bytes((len(token),)) + token)[0] == 0
    if has_tenant and case.action is Action.USER_ALTER:
        _make_user(world)
    assert isinstance(case.request, bytes)
    frame = case.request
    if case.command == "LOGIN_TOKEN":
        token = tokens[Player.ADMIN].encode()
        frame = iggy.classic(Code.LOGIN_TOKEN, bytes((len(token),)) + token)
    answer = peer.ask(frame)
    status = int.from_bytes(answer[:4], "little")
    assert status != 3, "the request cannot be decoded"
    return Outcome.NO if status in (40, 41) else Outcome.YES, answer[8:]


def _kafka(case: Case, player: Player, has_tenant: bool) -> tuple[Outcome, bytes]:
    world = kafka.World()
    broker = world.memory.broker
    tokens = furnish(broker, world.memory.run, has_tenant=has_tenant)
    member_id = "m"
    if has_tenant:
        tenant = world.connect()
        tenant.certified = broker.access.certified("tenant")
        joined = decode_response(Api.JOIN_GROUP, 3, tenant.exchange(join_frame(TOPIC))[4:])[1]
        tenant.exchange(beat_frame(TOPIC))
        for frame in share_frames(TOPIC):
            tenant.exchange(frame)
        member_id = joined.member_id
    peer = world.connect()
    if player in NAMES:
        peer.certified = broker.access.certified(NAMES[player])
    assert isinstance(case.request, bytes)
    frame = _of_member(case.request, member_id)
    if has_tenant:
        frame = frame.replace(TOPIC_ID, broker.topic(TOPIC).id)
    if case.command == "SHARE_ACKNOWLEDGE":
        peer.exchange(open_frame(broker.topic(TOPIC).id if has_tenant else TOPIC_ID))
    if case.command == "SASL_AUTHENTICATE":
        peer.ask(Api.SASL_HANDSHAKE, mechanism="PLAIN")
        frame = authenticate_frame("admin", tokens[Player.ADMIN])
    answer = peer.exchange(frame)
    if not answer and peer.gave_up is None:  # a joining member waits for the existing one
        world.memory.advance(REBALANCE_S)
        peer.pass_by()
        answer = peer.take()
    if peer.gave_up is not None:
        assert peer.gave_up.message.startswith("log in first"), peer.gave_up
        return Outcome.NO, answer
    topic = broker.find_topic(TOPIC)
    if topic is not None:
        answer = answer.replace(topic.id, TOPIC_ID)
    answer = answer.replace(broker.topic("foreign.own").id, OWN_TOPIC_ID)
    api, version = Api[case.command], int.from_bytes(case.request[6:8], "big")
    errors = set(_errors(decode_response(api, version, answer[4:])[1]))
    hidden = HIDDEN | {WireError.UNKNOWN_TOPIC_ID} if case.command.startswith("SHARE_") else HIDDEN
    return Outcome.NO if errors & (REFUSED | hidden) else Outcome.YES, answer


def _of_member(frame: bytes, member_id: str) -> bytes:
    """Return a request of the classic member ``m`` with this member id."""
    request = decode_request(memoryview(frame)[4:], SERVED)
    body = request.body
    if getattr(body, "member_id", "") != "m" or not hasattr(body, "group_id") or body.group_id != GROUP:
        return frame
    body.member_id = member_id
    return encode_request(request.api, request.version, request.correlation_id, body)


def _errors(body: Any) -> Iterator[int]:
    """Return every error in a response."""
    for name in body.DEFAULTS:
        value = getattr(body, name)
        if name == "error":
            yield value
        elif isinstance(value, list | tuple):
            for entry in value:
                yield from _errors(entry) if hasattr(entry, "DEFAULTS") else ()


def _kafka07(case: Case, player: Player, has_tenant: bool) -> tuple[Outcome, bytes]:
    world = kafka07.World()
    furnish(world.memory.broker, world.memory.run, has_tenant=has_tenant)
    peer = world.connect()
    if player in NAMES:
        peer.certified = world.memory.broker.access.certified(NAMES[player])
    assert isinstance(case.request, bytes)
    answer = peer.ask(case.request)
    if peer.gave_up is not None:
        assert "not allowed" in peer.gave_up.message, peer.gave_up.message
        return Outcome.NO, answer
    at = 10 if case.command == "MULTIFETCH" else 4
    refused = "FETCH" in case.command and answer[at : at + 2] == b"\xff\xff"
    return Outcome.NO if refused else Outcome.YES, answer


_PLAYS: Final[Mapping[str, Callable[[Case, Player, bool], tuple[Outcome, bytes]]]] = {
    "polywire": _polywire,
    "cursus": _cursus,
    "flux": _flux,
    "http": _http,
    "iggy": _iggy,
    "kafka": _kafka,
    "kafka07": _kafka07,
}
