"""Logins, permissions and topics' access lists over the Cursus protocol (spec: cursus#credentials)."""

from __future__ import annotations

import time

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import Grants, parse_grants
from polywire.protocols.cursus.messages import frame
from tests.unit.protocols.cursus.dialogue import Dialogue, World
from tests.unit.protocols.cursus.test_events import unpacked
from tests.unit.protocols.cursus.test_produce import batch, messages

WAIT_S_MAX = 60.0
HASH = hash_password("secret")
USERS = {
    "root": ("admin", "consume", "produce", "group", "transaction"),
    "reader": ("consume@default/orders", "group@default/orders"),
    "writer": ("produce@default/orders", "transaction"),
    "nothing": (),
}


def guarded() -> World:
    world = World()
    world.memory.broker.access.configure(
        [ConfiguredUser(name, HASH, parse_grants(words) if words else Grants()) for name, words in USERS.items()]
    )
    peer = world.connect()
    for topic in ("orders", "other"):
        assert ask(peer, f"CREATE topic={topic} partitions=1 principal=root auth_token=secret").startswith("OK")
    return world


def answers(peer: Dialogue, body: bytes) -> list[bytes]:
    """Return the response to a request that may wait for a password hash."""
    peer.feed(frame(body))
    deadline = time.monotonic() + WAIT_S_MAX
    while True:
        peer.pass_by()
        found = peer.take_bodies()
        if found:
            return found
        assert time.monotonic() < deadline, "no response arrived"
        time.sleep(0.001)


def ask(peer: Dialogue, text: str) -> str:
    (answer,) = answers(peer, text.encode())
    return answer.decode()


def logged_in(world: World, name: str) -> Dialogue:
    peer = world.connect()
    assert ask(peer, f"AUTH principal={name} token=secret") == f"OK principal={name} authenticated=true"
    return peer


def test_right_and_wrong_credentials() -> None:
    world = guarded()
    peer = world.connect()
    for text, answer in (
        ("AUTH principal=root", "ERROR: invalid_auth command=AUTH"),
        ("AUTH principal=root token=wrong", "ERROR: authentication_failed mechanism=PLAIN"),
        ("AUTH principal=ghost token=secret", "ERROR: authentication_failed mechanism=PLAIN"),
        ("LIST", "ERROR: authentication_required command=LIST"),
        ("CREATE topic=x partitions=1", "ERROR: authentication_required command=CREATE"),
        (
            "FETCH_OFFSET topic=orders partition=0 group=g principal=root",
            "ERROR: authentication_failed mechanism=PLAIN",
        ),
        ("PROTOCOL_INFO", "OK protocol=cursus"),
        ("HELP", "OK commands="),
        ("NEGOTIATE version=1", "OK protocol_version=1"),
        ("AUTH principal=root token=secret", "OK principal=root authenticated=true"),
        ("LIST", "OK count=2 topics=orders,other"),
        ("AUTH principal=root token=wrong", "ERROR: authentication_failed mechanism=PLAIN"),
        ("LIST", "ERROR: authentication_required command=LIST"),  # wrong credentials log the connection out
    ):
        assert ask(peer, text).startswith(answer), text


def test_inline_credentials_apply_to_their_own_request_only() -> None:
    peer = guarded().connect()
    assert ask(peer, "LIST_OFFSETS topic=orders principal=reader auth_token=secret").startswith("OK topic=orders")
    assert ask(peer, "LIST_OFFSETS topic=orders") == "ERROR: authentication_required command=LIST_OFFSETS"


def test_an_access_token_works_like_a_password() -> None:
    world = guarded()
    access = world.memory.broker.access
    user = access.user("reader")
    token = access.create_token(user, "t", None)
    peer = world.connect()
    assert ask(peer, f"AUTH principal=reader token={token}") == "OK principal=reader authenticated=true"
    assert ask(peer, f"AUTH principal=writer token={token}").startswith("ERROR: authentication_failed")


def test_each_command_needs_its_permissions() -> None:
    world = guarded()
    denied = "ERROR: NOT_AUTHORIZED_FOR_OPERATION command="
    for name, text, answer in (
        ("reader", "CREATE topic=x partitions=1", denied + "CREATE permission=admin"),
        ("reader", "LIST", "OK count=1 topics=orders"),
        ("reader", "DESCRIBE topic=other", denied + "DESCRIBE permission=topic.read"),
        ("reader", "CONSUME topic=orders partition=0 offset=0 member=m", ""),
        ("reader", "CONSUME topic=* partition=0 offset=0 member=m", ""),
        ("reader", "CONSUME topic=ot* partition=0 offset=0 member=m", 'ERROR: command_failed reason="no topics match'),
        ("reader", "JOIN_GROUP topic=orders group=g member=m", "OK generation=1"),
        ("reader", "JOIN_GROUP topic=other group=h member=m", denied + "JOIN_GROUP permission=group"),
        ("reader", "PUBLISH topic=orders producerId=p message=x", denied + "PUBLISH permission=topic.write"),
        ("reader", "INIT_PRODUCER_ID transactional_id=T", denied + "INIT_PRODUCER_ID permission=transaction"),
        ("writer", "PUBLISH topic=orders producerId=p message=x", '{"status":"OK"'),
        ("writer", "PUBLISH topic=other producerId=p message=x", denied + "PUBLISH permission=topic.write"),
        ("writer", "CONSUME topic=orders partition=0 offset=0 member=m", denied + "CONSUME permission=topic.read"),
        ("writer", "FIND_COORDINATOR group=g", denied + "FIND_COORDINATOR permission=group"),
        ("writer", "INIT_PRODUCER_ID transactional_id=T", "OK transactional_id=T"),
        ("nothing", "LIST", denied + "LIST permission=topic.read"),
        ("nothing", "LIST_GROUPS", denied + "LIST_GROUPS permission=group"),
    ):
        (found,) = answers(logged_in(world, name), text.encode())
        assert found.decode("latin-1").startswith(answer), text


def test_batches_need_permissions_like_commands() -> None:
    world = guarded()
    body = batch("orders", 0, messages(1))
    assert answers(world.connect(), body) == [b"ERROR: authentication_required command=BATCH"]
    reader = answers(logged_in(world, "reader"), body)
    assert reader == [b"ERROR: NOT_AUTHORIZED_FOR_TOPIC operation=write topic=orders"]
    assert answers(logged_in(world, "writer"), body)[0].startswith(b'{"status":"OK"')
    other = answers(logged_in(world, "writer"), batch("other", 0, messages(1)))
    assert other == [b"ERROR: NOT_AUTHORIZED_FOR_TOPIC operation=write topic=other"]


def test_a_deleted_user_loses_all_permissions() -> None:
    world = guarded()
    peer = logged_in(world, "reader")
    world.memory.broker.access.configure([ConfiguredUser("root", HASH, parse_grants(USERS["root"]))])
    assert ask(peer, "LIST") == "ERROR: NOT_AUTHORIZED_FOR_OPERATION command=LIST permission=topic.read"


@pytest.mark.parametrize(
    ("policy", "reads", "writes"),
    [
        ("open", True, True),
        ("deny_read", False, True),
        ("deny_write", True, False),
        ("acl read_acl=root,reader", True, False),
        ("acl read_acl=other write_acl=root", False, True),
        ("acl read_acl=* write_acl=*", True, True),
    ],
)
def test_a_topic_has_its_own_access_list(policy: str, reads: bool, writes: bool) -> None:
    world = guarded()
    peer = logged_in(world, "root")
    assert ask(peer, f"CREATE topic=acl partitions=1 auth_policy={policy}").startswith("OK")
    (read,) = answers(peer, b"CONSUME topic=acl partition=0 offset=0 member=m")
    assert (read[:2] == b"\xba\x7c") is reads
    assert (answers(peer, batch("acl", 0, messages(1)))[0][:1] == b"{") is writes
    assert ("acl" in ask(peer, "LIST")) is reads
    joined = ask(peer, "JOIN_GROUP topic=acl group=g member=m")
    assert joined.startswith("OK" if reads else "ERROR: NOT_AUTHORIZED_FOR_TOPIC operation=read topic=acl")


def test_a_topics_access_list_applies_on_a_broker_without_users() -> None:
    peer = World().connect()
    peer.ask("CREATE topic=acl partitions=1 auth_policy=acl read_acl=* write_acl=bob")
    denied = "ERROR: NOT_AUTHORIZED_FOR_TOPIC operation=write topic=acl"
    assert peer.ask(batch("acl", 0, messages(1))) == denied
    assert peer.ask("PUBLISH topic=acl producerId=p message=x") == denied
    assert peer.say(b"CONSUME topic=acl partition=0 offset=0 member=m")[0][:2] == b"\xba\x7c"
    for text in ("AUTH principal=iggy token=iggy", "LIST_OFFSETS topic=acl principal=a auth_token=b"):
        assert peer.ask(text) == "ERROR: authentication_failed mechanism=PLAIN"


def test_credentials_after_a_transactional_payload_are_not_part_of_it() -> None:
    world = guarded()
    peer = world.connect()
    own = "principal=writer auth_token=secret"
    init = ask(peer, f"INIT_PRODUCER_ID transactional_id=T {own}")
    who = "transactional_id=T " + " ".join(init.split()[2:])
    assert ask(peer, f"BEGIN_TXN {who} {own}").startswith("OK")
    publish = f"TXN_PUBLISH {who} topic=orders partition=0"
    assert ask(peer, f"{publish} seqNum=1 message=right words {own}").startswith("OK")
    wrong = ask(peer, f"{publish} seqNum=2 message=wrong words principal=writer auth_token=x")
    assert wrong == "ERROR: authentication_required command=TXN_PUBLISH"
    inside = logged_in(world, "writer")
    assert ask(inside, f"{publish} seqNum=2 message=kept principal=writer auth_token=x").startswith("OK")
    assert ask(peer, f"END_TXN {who} {own}").startswith("OK")
    (body,) = answers(logged_in(world, "reader"), b"CONSUME topic=orders partition=0 offset=0 member=m")
    found = [message["payload"] for message in unpacked(body)]
    assert found == [b"right words", b"kept principal=writer auth_token=x"]


@pytest.mark.parametrize(
    "command",
    ["LIST", "LIST_GROUPS", "CONSUME topic=o* partition=0 offset=0 member=m group=g", "LIST_OFFSETS topic=orders"],
)
def test_concurrent_lists_match_their_own_users_permissions(command: str) -> None:
    world = guarded()
    root, reader = logged_in(world, "root"), logged_in(world, "reader")
    for topic in ("orders", "other"):
        assert ask(root, f"REGISTER_GROUP topic={topic} group=of-{topic}").startswith("OK")
        assert b"OK" in answers(root, batch(topic, 0, messages(1)))[0]
    alone = {peer: answers(peer, command.encode()) for peer in (reader, root)}
    for first, second in ((reader, root), (root, reader)):
        first.feed(frame(command.encode()))  # its response is built in a later pass
        second.feed(frame(command.encode()))
        first.pass_by()
        assert {peer: peer.take_bodies() for peer in (reader, root)} == alone
