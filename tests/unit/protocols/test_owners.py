"""State of another user is refused with each protocol's own error."""

from __future__ import annotations

from polywire.broker.access import ConfiguredUser, Principal
from polywire.broker.owners import Caller
from polywire.broker.permissions import parse_grants
from polywire.errors import Denied, ErrorCode
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.dialect import D0
from polywire.protocols.iggy.errors import number_of
from polywire.protocols.iggy.messages import U32, Code
from polywire.protocols.iggy.session import IggySession
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from tests.unit.protocols.cursus.test_auth import ask, guarded, logged_in
from tests.unit.protocols.flux import dialogue as flux
from tests.unit.protocols.iggy import dialogue as iggy
from tests.unit.protocols.iggy.test_documented import GROUP, TOPIC, create_stream, create_topic
from tests.unit.protocols.polywire.peer import Peer
from tests.unit.protocols.polywire.test_auth import closed, log_in

SOMEONE = Caller(None, 77)
REASON = "not allowed: it belongs to another user (ask an administrator)"


def test_cursus_refuses_with_not_authorized() -> None:
    world = guarded()
    broker = world.memory.broker
    broker.transactions.begin_epoch("T1", by=SOMEONE, done=None)
    broker.groups.join("g", "orders", "m", wire="cursus", named_alone=True, by=SOMEONE)
    writer, reader = logged_in(world, "writer"), logged_in(world, "reader")
    for peer, text in (
        (writer, "INIT_PRODUCER_ID transactional_id=T1"),
        (reader, "JOIN_GROUP topic=orders group=g member=m"),
        (reader, "HEARTBEAT topic=orders group=g member=m generation=1"),
        (reader, "LEAVE_GROUP topic=orders group=g member=m"),
        (reader, "COMMIT_OFFSET topic=orders partition=0 group=g member=m generation=1 offset=5"),
        (reader, "BATCH_COMMIT topic=orders group=g member=m generation=1 P0:5"),
    ):
        answer = ask(peer, text)
        assert answer.startswith(f'ERROR: NOT_AUTHORIZED_FOR_OPERATION reason="{REASON}'), (text, answer)
    for text in ("TXN_STATUS transactional_id={}", "END_TXN transactional_id={} producerId=p epoch=0"):
        answers = [ask(writer, text.format(name)).replace(name, "") for name in ("T1", "none")]
        assert answers[0] == answers[1], "another user's id must look like a missing one"
        assert answers[0].startswith("ERROR: transaction_not_found"), answers


def refusal(peer: Peer, verb: Verb, head: Head) -> Denied:
    error = peer.ask(verb, head).error
    assert isinstance(error, Denied)
    assert error.code is ErrorCode.DENIED
    assert REASON in error.message
    return error


def test_polywire_refuses_with_denied() -> None:
    peer = closed("produce,consume,group,transaction")
    log_in(peer, "alice")
    peer.ask(Verb.PUBLISH, messages.Publish("w", 1, []))
    peer.ask(Verb.JOIN, messages.Join("g", "shop.orders", "m"))
    log_in(peer, "bob")
    for verb, head in (
        (Verb.PUBLISH, messages.Publish("w", 2, [])),
        (Verb.JOIN, messages.Join("g", "shop.orders", "n")),
        (Verb.LEAVE, messages.Member("g", "shop.orders", "m", 2)),
        (Verb.HEARTBEAT, messages.Member("g", "shop.orders", "m", 2)),
        (Verb.COMMIT, messages.Commit("shop.orders", 0, 1, "g", 5)),
        (Verb.COMMIT, messages.Commit("shop.orders", 0, 1, "g", 5, member="m", generation=2)),
    ):
        refusal(peer, verb, head)


def test_flux_refuses_with_bad_request() -> None:
    world = flux.World()
    broker = world.memory.broker
    broker.ensure_topic("t")
    broker.groups.join("g", "t", "m", wire="flux", named_alone=True, by=SOMEONE)
    broker.access.configure([ConfiguredUser("anonymous", "", parse_grants(["group", "consume"]))])
    peer = world.connect()
    for line in ("JOIN|g t m", "HEARTBEAT|g t m 2", "SYNC|g t m 2", "LEAVE|g t m 2", "COMMIT|g t m 2 0 5"):
        assert REASON in peer.ask(f"V1|1|{line}"), line


def test_iggy_refuses_with_not_allowed() -> None:
    world = iggy.World()
    broker = world.memory.broker
    peer = world.connect()
    assert create_stream(peer, 1, "s") == create_topic(peer, 1, "t") == 0
    five = TOPIC + U32.pack(5)
    assert peer.classic(Code.CREATE_GROUP, five)[0] == peer.classic(Code.JOIN_GROUP, five)[0] == 0
    broker.access.configure([ConfiguredUser(name, "", parse_grants(["read_topics"])) for name in ("alice", "bob")])
    broker.groups.join("group-5", "s.t", "m", wire="polywire", by=Caller(None, broker.access.user("bob").id))
    session = peer.session
    assert isinstance(session, IggySession)
    alice = broker.access.user("alice")
    session.principal = Principal(alice.id, alice.name)
    at = client_codec.place(GROUP, TOPIC, 1)
    for code, body in (
        (Code.JOIN_GROUP, five),
        (Code.DELETE_GROUP, five),
        (Code.STORE_OFFSET, at + bytes(8)),
        (Code.POLL, client_codec.poll(at, 1, 0, 10)),
    ):
        assert peer.classic(code, body)[0] == number_of(Denied(ErrorCode.DENIED, ""), D0), code
    session.close()  # closing a connection removes its own member
    view = broker.groups.view("group-5", "s.t")
    assert view is not None
    assert [member.id for member in view.members] == ["m"]
