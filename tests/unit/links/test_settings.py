"""Settings, users and permissions of the source of a link: what is carried, and what is listed."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence

import pytest

from polywire.client.copying import connected
from polywire.client.kafka_admin import Acl, TopicConfig
from polywire.client.polywire import PolywireClient
from polywire.errors import Denied, ErrorCode, Unavailable
from polywire.link_orders import LinkDefinition
from polywire.links import settings as settings_module
from polywire.links import topic as topic_module
from polywire.links.settings import access_notes, differences, from_kafka, permissions_of, users_of
from polywire.links.topic import LinkedTopic
from polywire.protocols.iggy.dialect import D3, FRAMED
from polywire.protocols.iggy.options import encode_options
from polywire.protocols.iggy.today_codec import read_limits
from polywire.records.columns import Record
from polywire.testing.thread import BrokerThread

WEEK_US = 7 * 86_400 * 1_000_000


@pytest.fixture(scope="module")
def old() -> Iterator[BrokerThread]:
    with BrokerThread() as running:
        yield running


@pytest.fixture(scope="module")
def new() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire"]) as running:
        yield running


def config(name: str, value: str, *, is_set: bool = True) -> TopicConfig:
    return TopicConfig(name, value, is_set)


def test_settings_of_kafka_and_those_without_an_equal() -> None:
    found = from_kafka(
        [
            config("cleanup.policy", "compact,delete"),
            config("retention.ms", "604800000", is_set=False),
            config("retention.bytes", "-1", is_set=False),
            config("compression.type", "zstd"),
            config("segment.bytes", "1000000"),
            config("segment.ms", "604800000", is_set=False),
        ]
    )
    assert found.carried == {
        "compaction": 1,
        "retention_age_us": WEEK_US,
        "retention_bytes": 0,
        "compression": "zstd",
    }
    assert found.others == ["segment.bytes=1000000"]


def test_a_compacted_topic_of_kafka_has_no_limits() -> None:
    """Kafka ignores the limits of topics that are only compacted. Here, they would delete records."""
    for order in (1, -1):
        configs = [config("cleanup.policy", "compact"), config("retention.ms", "604800000")][::order]
        assert from_kafka(configs).carried == {"compaction": 1, "retention_age_us": 0, "retention_bytes": 0}


@pytest.mark.parametrize("value", ["", "x", "-1", "9" * 5000, "\u0664", "1.5"])
def test_invalid_limits_are_no_limits(value: str) -> None:
    assert from_kafka([config("retention.ms", value)]).carried == {"retention_age_us": 0}


def test_limits_stay_below_the_maximum() -> None:
    assert from_kafka([config("retention.ms", str(2**62))]).carried == {"retention_age_us": 2**62}
    assert from_kafka([config("retention.bytes", "0")]).carried == {"retention_bytes": 1}


def acl(kind: int, name: str, operation: int, **fields: object) -> Acl:
    return Acl(
        **{  # type: ignore[arg-type]
            "principal": "User:alice",
            "host": "*",
            "resource_type": kind,
            "resource_name": name,
            "pattern_type": 3,
            "operation": operation,
            "permission_type": 3,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([acl(2, "orders", 3)], ["consume@default/orders"]),
        ([acl(2, "shop.orders", 4), acl(2, "*", 8)], ["produce@shop/orders", "read_topics"]),
        ([acl(2, "shop.", 3, pattern_type=4)], ["consume@shop"]),
        ([acl(3, "billing", 3), acl(2, "orders", 3)], ["consume@default/orders", "group@default/orders"]),
        ([acl(5, "tx", 4), acl(2, "orders", 4)], ["produce@default/orders", "transaction@default/orders"]),
        ([acl(4, "kafka-cluster", 12), acl(4, "kafka-cluster", 8)], ["read_servers"]),
    ],
)
def test_acls_become_permissions(rules: Sequence[Acl], words: Sequence[str]) -> None:
    assert permissions_of(rules) == (words, [])


@pytest.mark.parametrize(
    "rule",
    [
        acl(2, "orders", 3, permission_type=2),
        acl(2, "orders", 3, host="10.0.0.1"),
        acl(2, "ord", 3, pattern_type=4),
        acl(3, "billing", 3),
        acl(6, "token", 8),
        acl(4, "kafka-cluster", 9),
    ],
)
def test_acls_without_an_equal_are_listed(rule: Acl) -> None:
    assert permissions_of([rule]) == ([], [rule])
    command, line = users_of([rule], [])
    assert command == "user is not carried name='alice': polywire user add alice --permissions PERMISSIONS"
    assert line.startswith("ACL has no equal permission: principal='User:alice'")
    assert "resource=" in line


def settings_note(rule: Acl) -> str:
    return f"ACL has no equal permission: {settings_module._acl_text(rule)}"


def test_each_user_is_listed_once_and_quoted() -> None:
    rules = [acl(2, "orders", 3, principal="User:a b"), acl(2, "orders", 3, principal="Group:x")]
    assert list(users_of(rules, ["a b", "carol"])) == [
        "user is not carried name='a b': polywire user add 'a b' --scram --permissions consume@default/orders",
        "user is not carried name='carol': polywire user add carol --scram --permissions PERMISSIONS",
        settings_note(rules[1]),
    ]


def test_long_lists_end_with_the_number_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rules(_: object) -> list[Acl]:
        return [acl(2, "orders", 3, principal=f"User:{number}") for number in range(500)]

    monkeypatch.setattr(settings_module, "acls", rules)

    async def run(url: str) -> list[str]:
        async with connected(url) as client:
            return await access_notes(client)

    with BrokerThread(wires=["kafka"]) as broker:
        notes = asyncio.run(run(broker.url("kafka")))
    assert (len(notes), notes[-1]) == (201, "300 further users and ACLs of the source are not carried")


SETTINGS: dict[str, int | str | None] = {
    "retention_age_us": WEEK_US,
    "retention_bytes": 3_000_000,
    "compaction": 1,
    "compression": "lz4",
}


@pytest.mark.parametrize("wire", ["polywire", "kafka", "iggy"])
def test_a_link_carries_settings(
    old: BrokerThread, new: BrokerThread, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_module, "SETTINGS_S", 0.0)
    monkeypatch.setattr(topic_module, "COUNT_S", 0.0)
    topic = f"settings-{wire}"

    async def run() -> None:
        async with connected(old.url()) as admin, connected(old.url(wire)) as source, connected(new.url()) as target:
            assert isinstance(admin, PolywireClient)
            assert isinstance(target, PolywireClient)
            settings: dict[str, int | str | None] = {**SETTINGS, "compaction": 0} if wire != "polywire" else SETTINGS
            await admin.create_topic(topic, 3, settings=settings)
            linked = LinkedTopic(LinkDefinition("test", old.url(wire), (topic,)), topic, source, target)
            plan = await linked.plan()
            assert plan.settings["retention_age_us"] == WEEK_US
            await linked.step()
            found = (await target.describe(topic)).settings
            assert found["retention_age_us"] == WEEK_US
            if wire != "iggy":  # the dialect of 2023 has no size limit
                assert found["retention_bytes"] == 3_000_000
            if wire == "polywire":
                assert (found["compression"], found["compaction"]) == ("lz4", 1)
            await linked.step()
            assert linked.report().settings == ""
            await admin.configure_topic(topic, {"retention_age_us": 2 * WEEK_US})
            await linked.step()
            assert linked.report().settings == f"retention_age_us={2 * WEEK_US}"
            assert (await target.describe(topic)).settings["retention_age_us"] == WEEK_US

    asyncio.run(run())


def options(*, size_max: int) -> bytes:
    given = struct.pack("<BI", 2, 12) + b"segment_size" + struct.pack("<BIQ", 12, 8, 1 << 20)
    return encode_options(given, 1, WEEK_US, size_max, today=True)


def test_limits_of_todays_iggy() -> None:
    """Up to 0.11 they are fields, from 0.12 on they are options."""
    name = b"\x05today"
    fields = struct.pack("<IQIQBQQQ", 1, 0, 3, WEEK_US, 1, 9_000_000, 0, 0)
    without = struct.pack("<IQIQQ", 1, 0, 3, 0, 0)
    for payload, dialect in ((fields, D3), (without, FRAMED[-1])):
        found = read_limits(payload + name + options(size_max=9_000_000), dialect)
        assert (found.partition_count, found.expiry_us, found.size_max) == (3, WEEK_US, 9_000_000)
        assert found.others == (f"segment_size={1 << 20}",)
        unlimited = payload.replace(struct.pack("<Q", 9_000_000), b"\xff" * 8)
        assert read_limits(unlimited + name + options(size_max=2**64 - 1), dialect).size_max == 0


def test_the_size_limit_of_iggy_is_divided_by_the_partitions(old: BrokerThread) -> None:
    assert settings_module._from_iggy(0, 10, 3, []).carried == {"retention_age_us": 0, "retention_bytes": 3}
    assert settings_module._from_iggy(2**63, 1, 3, []).carried == {"retention_age_us": 2**62, "retention_bytes": 1}


def test_differences_name_the_values_of_the_source() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == "b=2"


def test_a_topic_is_copied_if_its_settings_cannot_be_read(
    old: BrokerThread, new: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Kafka, reading a topic and reading its settings are two permissions."""

    async def denied(*_: object) -> list[TopicConfig]:
        raise Denied(ErrorCode.DENIED, "not allowed")

    monkeypatch.setattr(settings_module, "topic_configs", denied)
    monkeypatch.setattr(topic_module, "COUNT_S", 0.0)

    async def run() -> None:
        async with connected(old.url()) as admin, connected(old.url("kafka")) as source, connected(new.url()) as target:
            assert isinstance(target, PolywireClient)
            await admin.create_topic("secret", 1)
            await admin.produce("secret", [Record(b"x")])
            linked = LinkedTopic(LinkDefinition("test", old.url("kafka"), ("secret",)), "secret", source, target)
            plan = await linked.plan()
            assert (plan.error, plan.other_settings) == ("", ["all, because they cannot be read: not allowed"])
            while await linked.step():
                pass
            assert (linked.report().copied, linked.report().settings) == (1, "")

    asyncio.run(run())


def test_a_source_that_does_not_respond_is_left(old: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> list[TopicConfig]:
        await asyncio.sleep(3600)
        return []

    monkeypatch.setattr(settings_module, "topic_configs", silent)
    monkeypatch.setattr(settings_module, "RESPONSE_S", 0.05)

    async def run() -> None:
        async with connected(old.url("kafka")) as source:
            with pytest.raises(Unavailable, match="did not respond in time"):
                await settings_module.source_settings(source, "any")

    asyncio.run(run())
