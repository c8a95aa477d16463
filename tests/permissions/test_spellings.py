"""No spelling of a name bypasses a permission: every command is run with unnecessary escapes."""

from __future__ import annotations

from dataclasses import replace
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.broker.access import ConfiguredUser
from polywire.broker.owners import ITSELF
from polywire.broker.permissions import Grants, grant_words, parse_grants, resource_name
from polywire.errors import Invalid
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import TopicName
from tests.permissions.cases import SECRET, Case, Outcome, Player, cases, expected
from tests.permissions.players import HASH, play
from tests.unit.protocols.cursus import dialogue as cursus

SPELLINGS = {b"shop.": (b"%73hop.", b"shop%2e", b"s%68o%70%2E")}


def _spelled(case: Case, plain: bytes, spelling: bytes) -> Case | None:
    request = case.request
    if not isinstance(request, bytes) or plain not in request or case.command == "a batch":
        return None
    for name in (b"shop.orders", b"shop.events", b"shop.made"):
        other = name.replace(plain, spelling)
        request = request.replace(pack(">h", len(name)) + name, pack(">h", len(other)) + other)
    request = request.replace(plain, spelling)
    if case.wire == "kafka07":
        request = pack(">i", len(request) - 4) + request[4:]
    return replace(case, request=request)


CASES = [
    found
    for case in cases()
    if case.wire in ("flux", "cursus", "kafka07")
    for plain, spellings in SPELLINGS.items()
    for spelling in spellings
    if (found := _spelled(case, plain, spelling)) is not None
]


def test_every_protocol_with_escapes_has_cases() -> None:
    assert {case.wire for case in CASES} == {"flux", "cursus", "kafka07"}


@pytest.mark.parametrize("player", [Player.OTHER, Player.TENANT])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.wire}-{case.command}-{case.action.word}")
def test_an_escaped_name_has_the_permissions_of_the_name(case: Case, player: Player) -> None:
    found, answer = play(case, player)
    wanted = expected(case, player)
    assert found is (Outcome.YES if wanted is Outcome.OWN else wanted), answer
    if player is Player.OTHER:
        assert SECRET not in answer.replace(b"shop.orders", b"")


def test_a_name_with_wildcards_is_not_a_pattern_in_permission_checks() -> None:
    """Only CONSUME has patterns; a user who may delete some topics must not delete one that is named like a pattern."""
    world = cursus.World()
    broker = world.memory.broker
    topic = broker.create_topic(TopicName("shop", "a*b"), 1)
    broker.access.configure([ConfiguredUser("other", HASH, parse_grants(["manage_streams@foreign"]))])
    token = broker.access.create_token(broker.access.user("other"), "t", None)
    peer = world.connect()
    assert peer.ask(f"AUTH principal=other token={token}").startswith("OK")
    for word in ("shop.a*b", "shop.a%2Ab", "shop.a%2ab"):
        for command in ("DELETE", "DESCRIBE", "METADATA", "LIST_OFFSETS"):
            assert "NOT_AUTHORIZED" in peer.ask(f"{command} topic={word}"), (command, word)
    assert broker.find_topic("shop.a*b") is topic


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        ("consume@my%20shop", "my shop.orders"),
        ("consume@a%2Fb", "a/b.c"),
        ("consume@a%2Fb/c", "a/b.c"),
        ("consume@a/b%2Fc", "a.b/c"),
        ("consume@50%", "50%.x"),
        ("consume@x@y", "x@y.z"),
    ],
)
def test_permission_words_can_name_any_topic_exactly(word: str, allowed: str) -> None:
    grants = parse_grants([word]).opened()
    for full in ("my shop.orders", "a/b.c", "a.b/c", "50%.x", "x@y.z", "my%20shop.orders", "a%2Fb.c"):
        name = TopicName.parse(full)
        assert grants.allow(256, name.stream, name.topic) is (full == allowed), full


@pytest.mark.parametrize("word", ["consume@a%FFb", "consume@a/b%0A", "consume@%C3"])
def test_an_invalid_permission_word_is_refused(word: str) -> None:
    with pytest.raises(Invalid):
        parse_grants([word])


def test_invalid_names_are_refused_by_the_broker() -> None:
    memory = MemoryBroker()
    for name in ("a\x00b", "..", "x" * 256, "a\u2028b", "\udcff"):
        with pytest.raises(Invalid):
            memory.broker.create_topic(TopicName("default", name), by=ITSELF)


NAMES = st.text(min_size=1, max_size=4, alphabet="ab.%/@, 2Cä")
GIVEN = st.integers(1, 4095)
TOPICS = st.builds(resource_name, NAMES, NAMES)


@given(st.integers(0, 4095), st.dictionaries(NAMES, GIVEN, max_size=3), st.dictionaries(TOPICS, GIVEN, max_size=3))
def test_permission_words_round_trip(everywhere: int, streams: dict[str, int], topics: dict[str, int]) -> None:
    grants = Grants(everywhere, streams, topics)
    words = grant_words(grants)
    assert parse_grants(words) == grants
    assert parse_grants(word.strip() for word in ", ".join(words).split(",") if word) == grants


def test_permission_words_are_minimal() -> None:
    assert grant_words(parse_grants(["admin"])) == ["admin"]
    assert grant_words(parse_grants(["all"])) == ["all"]
    assert grant_words(parse_grants(["produce@shop/orders", "consume"])) == ["consume", "produce@shop/orders"]
