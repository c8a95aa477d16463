"""A user cannot take another user's name, and hidden resources look like missing ones."""

from __future__ import annotations

from struct import pack

from polywire.broker.access import ConfiguredUser
from polywire.broker.broker import Broker
from polywire.broker.permissions import parse_grants
from polywire.protocols.iggy.context import IggySettings
from polywire.protocols.iggy.messages import Code
from polywire.types import TopicName
from tests.permissions.cases import Player
from tests.permissions.players import HASH, NAMES, furnish
from tests.unit.protocols.cursus import dialogue as cursus
from tests.unit.protocols.cursus.test_produce import batch, messages
from tests.unit.protocols.iggy import dialogue as iggy

DENIED = 41
FIELDS = b"\x01" + pack("<QQB", 0, 0, 1)


def named(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def ident(text: str) -> bytes:
    return b"\x02" + named(text)


def iggy_as(player: Player) -> tuple[iggy.World, iggy.Dialogue]:
    world = iggy.World(iggy=IggySettings(dialect="0.8"))
    tokens = furnish(world.memory.broker, world.memory.run)
    peer = world.connect()
    assert peer.classic(Code.LOGIN_TOKEN, named(tokens[player]))[0] == 0
    return world, peer


def cursus_as(player: Player) -> tuple[cursus.World, cursus.Dialogue]:
    world = cursus.World()
    tokens = furnish(world.memory.broker, world.memory.run)
    peer = world.connect()
    assert peer.ask(f"AUTH principal={NAMES[player]} token={tokens[player]}").startswith("OK")
    return world, peer


def regrant(broker: Broker, words: str) -> None:
    """Replace the tenant's permissions."""
    grants = {"tenant": parse_grants([words]), "admin": parse_grants(["admin"])}
    broker.access.configure([ConfiguredUser(name, HASH, given) for name, given in grants.items()])


def test_a_stream_cannot_be_renamed_to_a_name_the_user_may_not_create() -> None:
    _, peer = iggy_as(Player.OTHER)
    for name in ("bank", "shop", "default"):
        assert peer.classic(Code.UPDATE_STREAM, ident("foreign") + named(name))[0] == DENIED, name


def test_a_topic_cannot_be_renamed_to_a_name_the_user_may_not_create() -> None:
    world, peer = iggy_as(Player.TENANT)
    world.memory.broker.create_topic(TopicName("shop", "mine"), 1)
    regrant(world.memory.broker, "manage_topics@shop/mine")
    topic = ident("shop") + ident("mine")
    assert peer.classic(Code.UPDATE_TOPIC, topic + FIELDS + named("paid"))[0] == DENIED
    assert peer.classic(Code.UPDATE_TOPIC, topic + FIELDS + named("mine"))[0] == 0


def test_existing_names_are_refused_and_not_changed() -> None:
    world, peer = iggy_as(Player.ADMIN)
    broker = world.memory.broker
    topic = ident("shop") + ident("orders")
    assert peer.classic(Code.UPDATE_TOPIC, topic + FIELDS + named("renamed"))[0] == 0
    create = ident("shop") + pack("<I", 1) + FIELDS
    assert peer.classic(Code.CREATE_TOPIC, create + named("orders"))[0] == 2013, "the name exists in another place"
    assert peer.classic(Code.UPDATE_STREAM, ident("shop") + named("store"))[0] == 0
    assert peer.classic(Code.CREATE_STREAM, named("shop"))[0] == 1012
    assert [found.name.full for found in broker.topics()] == ["foreign.own", "shop.events", "shop.orders"]


def test_a_stream_with_a_dot_is_one_stream_everywhere() -> None:
    world, peer = iggy_as(Player.ADMIN)
    assert peer.classic(Code.CREATE_STREAM, named("my.stream"))[0] == 0
    assert peer.classic(Code.CREATE_TOPIC, ident("my.stream") + pack("<I", 1) + FIELDS + named("a.b"))[0] == 0
    assert world.memory.broker.topic("my=stream.a.b").name == TopicName("my=stream", "a.b")
    assert peer.classic(Code.GET_TOPIC, ident("my=stream") + ident("a.b"))[1]
    assert peer.classic(Code.CREATE_STREAM, named("my=stream"))[0] == 1012


def test_iggy_gives_the_same_error_for_hidden_and_missing_resources() -> None:
    _, peer = iggy_as(Player.OTHER)
    hidden, missing = ident("shop"), ident("nothing")
    number = b"\x01\x04" + pack("<I", 77)
    for code in (Code.GET_STREAM, Code.GET_TOPICS, Code.DELETE_STREAM):
        assert {peer.classic(code, stream) for stream in (hidden, missing, number)} == {(DENIED, b"")}, code.name
    for topic in (hidden + ident("orders"), hidden + ident("nothing"), missing + ident("orders")):
        assert peer.classic(Code.GET_TOPIC, topic) == (DENIED, b"")
    assert peer.classic(Code.GET_TOPIC, ident("foreign") + ident("nothing")) == (0, b""), (
        "owners may learn what is missing"
    )
    for user in ("tenant", "unknown"):
        assert peer.classic(Code.DELETE_USER, ident(user)) == (DENIED, b"")


def test_cursus_gives_the_same_error_for_hidden_and_missing_resources() -> None:
    _, peer = cursus_as(Player.OTHER)
    for topic in ("shop.orders", "shop.nothing"):
        refused = f"ERROR: NOT_AUTHORIZED_FOR_TOPIC operation=write topic={topic}".encode()
        assert peer.say(batch(topic, 0, messages(1))) == [refused]
    assert peer.ask("GROUP_STATUS group=g") == peer.ask("GROUP_STATUS group=h").replace("'h'", "'g'")


def test_a_transaction_ends_with_the_permissions_of_that_time() -> None:
    world, peer = cursus_as(Player.TENANT)
    init = peer.ask("INIT_PRODUCER_ID transactional_id=T")
    who = "transactional_id=T " + " ".join(init.split()[2:])
    assert peer.ask(f"BEGIN_TXN {who}").startswith("OK")
    assert peer.ask(f"TXN_PUBLISH {who} topic=shop.orders partition=0 seqNum=1 message=x").startswith("OK")
    regrant(world.memory.broker, "transaction@shop")
    denied = "ERROR: NOT_AUTHORIZED_FOR_TOPIC operation=write topic=shop.orders"
    assert peer.ask(f"END_TXN {who} result=commit") == denied
    assert peer.ask(f"END_TXN {who} result=abort").startswith("OK")
