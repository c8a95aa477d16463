"""Tests of the redrive of dead letters: once, in one transaction, to named topics only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.broker.topics import Partition
from polywire.broker.transaction_state import Transaction
from polywire.broker.transactions import Transactions
from polywire.errors import Busy, ErrorCode, Invalid
from polywire.http import dead_letters
from polywire.http.endpoints import PREFIX
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records, to_records
from polywire.types import Level, PositionKind, TopicName
from tests.unit.http.site import Answer, Peer, Site, answer_of, request
from tests.unit.http.test_guard import CHANGE, basic

DEAD = "shop.orders.dead"
ORDERS = "shop.orders"


def letter(value: bytes, topic: str = ORDERS, partition: str = "1", *, key: bytes | None = None) -> Record:
    """Return a dead letter as ``refine`` writes it."""
    said = {"reason": "malformed", "topic": topic, "partition": partition, "offset": "7"}
    headers = [
        Header(b"trace", b"\xff"),
        *(Header(f"dead.{name}".encode(), text.encode()) for name, text in said.items()),
    ]
    return Record(value, key, tuple(headers), origin_time_us=1_000_000)


def store(site: Site, topic: str, records: Sequence[Record], *, partition: int = 0) -> None:
    target = site.broker.topic(topic).partitions[partition]
    site.broker.produce(target, from_records(records), level=Level.WRITTEN, done=None)
    site.broker.commit()


@pytest.fixture
def dead(site: Site) -> Site:
    for name, count in ((ORDERS, 3), (DEAD, 2), ("shop.other", 1)):
        site.broker.create_topic(TopicName.parse(name), count)
    store(site, DEAD, [letter(b"a", key=b"k"), letter(b"b", partition="2")])
    store(site, DEAD, [letter(b"c", partition="none"), Record(b"no letter")], partition=1)
    return site


def look(site: Site, topic: str = DEAD) -> Any:
    return site.ask("GET", f"{PREFIX}/topics/{topic}/dead-letters").json


def redrive(site: Site, body: Any, login: dict[str, str] | None = None) -> Answer:
    return site.ask("POST", f"{PREFIX}/topics/{DEAD}/redrive", CHANGE | (login or {}), body)


def stored_in(partition: Partition) -> list[Record]:
    read = partition.log.read(0, bytes_max=1 << 20, then=lambda _: None)
    return [record for chunk in read.chunks for record in to_records(chunk)]  # type: ignore[union-attr]


def values(site: Site, topic: str = ORDERS) -> list[bytes | None]:
    return sorted(record.value for partition in site.broker.topic(topic).partitions for record in stored_in(partition))  # type: ignore[type-var]


def test_letters_are_redriven_unchanged_and_once(dead: Site) -> None:
    assert look(dead) == {
        "topic": DEAD,
        "waiting": 4,
        "letters": 3,
        "others": 1,
        "more": False,
        "targets": [{"topic": ORDERS, "letters": 3}],
    }
    assert redrive(dead, {"topics": [ORDERS]}).json["letters"] == 3
    assert values(dead) == [b"a", b"b", b"c"]
    (record,) = (one for one in stored_in(dead.broker.topic(ORDERS).partitions[1]) if one.value == b"a")
    assert (record.key, record.headers, record.origin_time_us) == (b"k", (Header(b"trace", b"\xff"),), 1_000_000)
    assert [one.value for one in stored_in(dead.broker.topic(ORDERS).partitions[2])][:1] == [b"b"]
    assert look(dead)["waiting"] == 0
    assert redrive(dead, {"topics": [ORDERS]}).json["letters"] == 0
    assert len(values(dead)) == 3
    store(dead, DEAD, [letter(b"d")])
    redrive(dead, {"topics": [ORDERS]})
    assert values(dead) == [b"a", b"b", b"c", b"d"]
    assert not dead.broker.transactions.visible(by=dead.caller), "the redrive leaves no transactional id behind"


def test_letters_go_only_to_topics_in_the_request(dead: Site) -> None:
    store(dead, DEAD, [letter(b"forged", "shop.other")])
    refused = redrive(dead, {"topics": [ORDERS]})
    assert refused.status == 400
    assert "shop.other" in refused.json["error"]["message"]
    assert redrive(dead, {}).status == 400
    assert (values(dead), values(dead, "shop.other"), look(dead)["waiting"]) == ([], [], 5)
    redrive(dead, {"topics": [ORDERS, "shop.other"]})
    assert values(dead, "shop.other") == [b"forged"]


def test_a_failed_redrive_sends_and_commits_nothing(dead: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dead.broker.transactions.put_offsets

    def full(*_: Any, **__: Any) -> None:
        raise Busy(ErrorCode.DISK_FULL, "no space")

    monkeypatch.setattr(type(dead.broker.transactions), "put_offsets", full)
    assert redrive(dead, {"topics": [ORDERS]}).status == 503
    monkeypatch.setattr(
        type(dead.broker.transactions), "put_offsets", lambda _, *given, **named: whole(*given, **named)
    )
    assert (values(dead), look(dead)["waiting"]) == ([], 4)
    redrive(dead, {"topics": [ORDERS]})
    assert len(values(dead)) == 3


def test_concurrent_redrives_send_letters_once(dead: Site) -> None:
    """Both have read the letters before either sends."""
    sent = request("POST", f"{PREFIX}/topics/{DEAD}/redrive", CHANGE, b'{"topics": ["shop.orders"]}')
    peers = [Peer(), Peer()]

    async def both() -> None:
        await asyncio.gather(*(dead.application.exchange(peer, asyncio.Event()).run(sent) for peer in peers))

    dead.loop.run_until_complete(both())
    assert sorted(answer_of(bytes(peer.sent)).status for peer in peers) == [200, 409]
    assert values(dead) == [b"a", b"b", b"c"]


def test_a_deleted_target_stops_the_whole_redrive(dead: Site) -> None:
    store(dead, DEAD, [letter(b"x", "shop.gone")])
    assert redrive(dead, {"topics": [ORDERS, "shop.gone"]}).code == "topic_missing"
    assert values(dead) == []


def test_redrives_have_a_size_limit(dead: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "LETTERS_MAX", 2)
    first = redrive(dead, {"topics": [ORDERS]}).json
    assert (first["letters"], first["more"]) == (2, True)
    assert values(dead) == [b"a", b"b"]
    redrive(dead, {"topics": [ORDERS]})
    assert values(dead) == [b"a", b"b", b"c"]
    monkeypatch.setattr(dead_letters, "LETTERS_BYTES_MAX", 3)
    monkeypatch.setattr(dead_letters, "LETTERS_MAX", 100)
    store(dead, DEAD, [letter(b"long"), letter(b"next")])
    assert redrive(dead, {"topics": [ORDERS]}).json["letters"] == 1, "one letter is always sent"


def test_redriving_one_letter_commits_no_offset(dead: Site) -> None:
    sent = redrive(dead, {"topics": [ORDERS], "partition": 0, "offset": 1}).json
    assert sent["letters"] == 1
    assert values(dead) == [b"b"]
    assert dead.broker.position(DEAD, 0, PositionKind.GROUP, "redrive") is None
    for body in (
        {"offset": 9},
        {"offset": -1},
        {"offset": "1"},
        {"offset": 1, "partition": 1},
        {"offset": 0, "partition": 9},
    ):
        assert redrive(dead, {"topics": [ORDERS], **body}).status in (400, 404), body


@pytest.mark.parametrize("topics", ["shop.orders", [1], [[]], ["t"] * 101], ids=str)
def test_invalid_targets_are_rejected(dead: Site, topics: Any) -> None:
    assert redrive(dead, {"topics": topics}).status == 400


def test_a_redrive_needs_produce_for_its_targets(dead: Site) -> None:
    words = ["consume@shop", "group@shop"]
    dead.configure(boss=EVERYTHING, reader=parse_grants(words), writer=parse_grants([*words, "produce@shop/orders"]))
    assert redrive(dead, {"topics": [ORDERS]}, basic("reader", "reader")).status == 403
    assert values(dead) == []
    assert redrive(dead, {"topics": [ORDERS]}, basic("writer", "writer")).status == 200
    assert len(values(dead)) == 3


def test_clients_cannot_use_the_transactional_id_of_a_redrive(dead: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions, used = dead.broker.transactions, []
    number_producer = type(transactions).number_producer

    def noting(self: Transactions, id_: str, **options: Any) -> Transaction:
        used.append(id_)
        return number_producer(self, id_, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(transactions), "number_producer", noting)
        assert redrive(dead, {"topics": [ORDERS]}).status == 200
    (id_,) = used
    with pytest.raises(Invalid, match="reserved"):
        transactions.begin_epoch(id_, by=dead.caller, done=None)
    with pytest.raises(Invalid, match="reserved"):
        transactions.number_producer(id_, asks_again=False, timeout_us=1, by=dead.caller, done=None)
    store(dead, DEAD, [letter(b"d")])
    assert redrive(dead, {"topics": [ORDERS]}).json["letters"] == 1
