"""Settings by Kafka's names (spec: kafka#describeconfigs, kafka#alterconfigs, kafka#describelogdirs)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polywire.broker.settings import Compression, TopicSettings
from polywire.broker.topics import Topic
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.configs import AFTER, BEFORE, INT, LONG, TOPIC_CONFIGS, produce_limits
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.messages import Api, WireError
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.types import TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World

TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)


@pytest.fixture
def peer() -> Dialogue:
    peer = World(kafka=KafkaSettings(data_dir=Path())).connect()
    peer.world.memory.broker.create_topic(TopicName.parse("orders"), 1)
    return peer


def topic_of(peer: Dialogue) -> Topic:
    return peer.world.memory.broker.topic("orders")


def described(
    peer: Dialogue, name: str = "orders", kind: int = TOPIC, version: int = 4, **fields: Any
) -> tuple[int, dict[str, Any]]:
    asked = schema.request(Api.DESCRIBE_CONFIGS).Resources
    keys = fields.pop("keys", None)
    resource = asked(resource_type=kind, resource_name=name, configuration_keys=keys)
    (result,) = peer.ask(Api.DESCRIBE_CONFIGS, version, resources=[resource], **fields).results
    return result.error, {config.name: config for config in result.configs}


def changed(peer: Dialogue, *changes: tuple[str, int, str | None], **fields: Any) -> int:
    asked = schema.request(Api.INCREMENTAL_ALTER_CONFIGS).Resources
    configs = [asked.Configs(name=name, config_operation=operation, value=value) for name, operation, value in changes]
    resource = asked(resource_type=TOPIC, resource_name="orders", configs=configs)
    error: int = peer.ask(Api.INCREMENTAL_ALTER_CONFIGS, resources=[resource], **fields).responses[0].error
    return error


@pytest.mark.parametrize("version", range(1, 5))
def test_settings_of_a_topic(peer: Dialogue, version: int) -> None:
    error, configs = described(peer, version=version)
    assert (error, set(configs)) == (0, set(TOPIC_CONFIGS))
    assert (configs["cleanup.policy"].value, configs["retention.ms"].value) == ("delete", "-1")
    assert {(config.config_source, config.read_only) for config in configs.values()} == {(5, False)}


def test_single_settings(peer: Dialogue) -> None:
    error, configs = described(peer, keys=["retention.ms", "colour"], include_synonyms=True)
    assert (error, list(configs)) == (0, ["retention.ms"])
    assert [(one.name, one.source) for one in configs["retention.ms"].synonyms] == [("retention.ms", 5)]


@pytest.mark.parametrize("version", range(1, 5))
def test_documentation_describes_the_effect(peer: Dialogue, version: int) -> None:
    _, configs = described(peer, version=version)
    assert {config.documentation for config in configs.values()} == {None}
    if version >= 3:
        _, configs = described(peer, version=version, include_documentation=True)
        documentation = {name: config.documentation for name, config in configs.items()}
        assert documentation["max.message.bytes"] == "largest batch in bytes, as the producer sends it"
        assert documentation["segment.ms"] == "no effect: the value is stored and returned"


def test_settings_of_the_broker(peer: Dialogue) -> None:
    error, configs = described(peer, "1", BROKER)
    assert error == 0
    assert configs["advertised.listeners"].value == "PLAINTEXT://127.0.0.1:9094"
    assert configs["num.partitions"].value == "3"
    assert {(config.config_source, config.read_only) for config in configs.values()} == {(4, True)}
    assert described(peer, "", BROKER) == (0, {})
    assert described(peer, "2", BROKER) == (WireError.INVALID_REQUEST, {})
    assert described(peer, "1", 8) == (WireError.INVALID_REQUEST, {})
    assert described(peer, "none") == (WireError.UNKNOWN_TOPIC_OR_PARTITION, {})


def test_supported_settings_change_the_topic(peer: Dialogue) -> None:
    assert not changed(
        peer,
        ("retention.ms", SET, "60000"),
        ("retention.bytes", SET, "-1"),
        ("cleanup.policy", SET, "compact"),
        ("compression.type", SET, "lz4"),
        ("segment.ms", SET, "7"),
    )
    settings = topic_of(peer).settings
    assert (settings.retention_age_us, settings.retention_bytes, settings.compaction, settings.compression) == (
        60_000_000,
        0,
        True,
        Compression.LZ4,
    )
    _, configs = described(peer)
    own = {name: config.value for name, config in configs.items() if config.config_source == 1}
    assert own == {
        "retention.ms": "60000",
        "retention.bytes": "-1",
        "cleanup.policy": "compact",
        "compression.type": "lz4",
        "segment.ms": "7",
    }
    assert not changed(peer, *[(name, DELETE, None) for name in own])
    assert topic_of(peer).settings == TopicSettings()


def test_settings_made_over_other_protocols_are_reported(peer: Dialogue) -> None:
    broker = peer.world.memory.broker
    settings = replace(topic_of(peer).settings, compaction=True, retention_age_us=5_000, retention_bytes=9)
    broker.configure_topic(topic_of(peer), settings)
    _, configs = described(peer)
    reported = [configs[name].value for name in ("cleanup.policy", "retention.ms", "retention.bytes")]
    assert reported == ["compact", "5", "9"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("colour", "red"),
        ("retention.ms", "soon"),
        ("retention.ms", "9" * 30),
        ("retention.ms", ""),
        ("retention.ms", "--1"),
        ("cleanup.policy", "keep"),
        ("compression.type", "brotli"),
        ("preallocate", "yes"),
        ("min.cleanable.dirty.ratio", "half"),
        ("follower.replication.throttled.replicas", "x" * 5_000),
        ("message.timestamp.type", "AppendTime"),
    ],
)
def test_invalid_settings_are_refused(peer: Dialogue, name: str, value: str) -> None:
    assert changed(peer, (name, SET, value)) == WireError.INVALID_CONFIG
    assert topic_of(peer).settings == TopicSettings()


LEAST = {
    **dict.fromkeys(("local.retention.bytes", "local.retention.ms"), -2),
    **dict.fromkeys(("retention.bytes", "retention.ms"), -1),
    **dict.fromkeys(("flush.messages", "max.compaction.lag.ms", "min.insync.replicas", "segment.ms"), 1),
    "segment.bytes": 14,
    "segment.index.bytes": 4,
}
MOST = {INT: 2**31 - 1, LONG: 2**63 - 1}
NUMBERS = [name for name, config in TOPIC_CONFIGS.items() if config.kind in MOST]


def created(peer: Dialogue, name: str, value: str | None, **fields: Any) -> int:
    asked = schema.request(Api.CREATE_TOPICS).Topics
    one = asked(name="new", num_partitions=1, replication_factor=1, configs=[asked.Configs(name=name, value=value)])
    error: int = peer.ask(Api.CREATE_TOPICS, topics=[one], **fields).topics[0].error
    return error


def replaced(peer: Dialogue, name: str, value: str | None) -> int:
    asked = schema.request(Api.ALTER_CONFIGS).Resources
    one = asked(resource_type=TOPIC, resource_name="orders", configs=[asked.Configs(name=name, value=value)])
    error: int = peer.ask(Api.ALTER_CONFIGS, resources=[one]).responses[0].error
    return error


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range_for_every_request(peer: Dialogue, name: str) -> None:
    least, most = LEAST.get(name, 0), MOST[TOPIC_CONFIGS[name].kind]
    most = BATCH_BYTES_MAX if name == "max.message.bytes" else most
    for value in (least - 1, most + 1, -(2**63)):
        refused = (
            created(peer, name, str(value)),
            changed(peer, (name, SET, str(value))),
            replaced(peer, name, str(value)),
        )
        assert refused == (WireError.INVALID_CONFIG,) * 3, value
    assert topic_of(peer).settings == TopicSettings()
    for value in (least, most):
        taken = created(peer, name, str(value), validate_only=True), changed(peer, (name, SET, str(value)))
        assert (*taken, replaced(peer, name, str(value))) == (0, 0, 0), value


@pytest.mark.parametrize("value", ["2", "1.1", "-0.1", "nan", ".", ""])
def test_a_ratio_lies_between_0_and_1(peer: Dialogue, value: str) -> None:
    name = "min.cleanable.dirty.ratio"
    refused = created(peer, name, value), changed(peer, (name, SET, value)), replaced(peer, name, value)
    assert refused == (WireError.INVALID_CONFIG,) * 3
    assert not changed(peer, (name, SET, "1"), ("retention.ms", SET, "5"))
    assert not changed(peer, (name, SET, "0.0"))


def test_a_setting_needs_a_value(peer: Dialogue) -> None:
    assert created(peer, "retention.ms", None) == WireError.INVALID_CONFIG
    assert replaced(peer, "retention.ms", None) == WireError.INVALID_CONFIG


def test_a_refusal_names_the_allowed_values(peer: Dialogue) -> None:
    asked = schema.request(Api.CREATE_TOPICS).Topics
    configs = [asked.Configs(name="max.message.bytes", value="20000000")]
    one = asked(name="new", num_partitions=1, replication_factor=1, configs=configs)
    message = peer.ask(Api.CREATE_TOPICS, topics=[one]).topics[0].message
    assert message == f"topic setting is invalid: max.message.bytes (use 0 to {BATCH_BYTES_MAX}) value='20000000'"


def test_stored_values_out_of_range_have_no_effect() -> None:
    """Earlier versions accepted them."""
    given = {"max.message.bytes": "20000000", BEFORE: "-1", AFTER: "-5"}
    stored = TopicSettings(wire_options={"kafka": json.dumps(given).encode()})
    assert produce_limits(stored) == produce_limits(TopicSettings())
    assert produce_limits(TopicSettings(wire_options={"kafka": json.dumps({BEFORE: "7"}).encode()})).before_ms == 7


def test_defaults_can_be_set(peer: Dialogue) -> None:
    for name, config in TOPIC_CONFIGS.items():
        assert not changed(peer, (name, SET, config.default)), name


def test_lists_can_be_appended_to_and_subtracted_from(peer: Dialogue) -> None:
    assert not changed(peer, ("cleanup.policy", APPEND, "compact"))
    assert described(peer)[1]["cleanup.policy"].value == "delete,compact"
    assert not changed(peer, ("cleanup.policy", SUBTRACT, "compact"))
    assert described(peer)[1]["cleanup.policy"].value == "delete"
    assert topic_of(peer).settings.compaction is False
    assert changed(peer, ("retention.ms", APPEND, "1")) == WireError.INVALID_CONFIG
    assert changed(peer, ("retention.ms", 9, "1")) == WireError.INVALID_CONFIG
    assert changed(peer, ("retention.ms", SET, None)) == WireError.INVALID_CONFIG


def test_all_settings_at_once(peer: Dialogue) -> None:
    assert not changed(peer, ("retention.ms", SET, "60000"), ("cleanup.policy", SET, "compact"))
    asked = schema.request(Api.ALTER_CONFIGS).Resources
    configs = [asked.Configs(name="segment.ms", value="7")]
    resource = asked(resource_type=TOPIC, resource_name="orders", configs=configs)
    assert not peer.ask(Api.ALTER_CONFIGS, resources=[resource], validate_only=True).responses[0].error
    assert topic_of(peer).settings.compaction
    assert not peer.ask(Api.ALTER_CONFIGS, resources=[resource]).responses[0].error
    settings = topic_of(peer).settings
    assert (settings.compaction, settings.retention_age_us) == (False, None)
    broker = asked(resource_type=BROKER, resource_name="1", configs=configs)
    assert peer.ask(Api.ALTER_CONFIGS, resources=[broker]).responses[0].error == WireError.INVALID_REQUEST


def test_options_of_other_protocols_are_preserved(peer: Dialogue) -> None:
    broker = peer.world.memory.broker
    broker.configure_topic(topic_of(peer), TopicSettings(wire_options={"iggy": b"x"}))
    assert not changed(peer, ("segment.ms", SET, "7"))
    assert not changed(peer, ("segment.ms", DELETE, None))
    assert topic_of(peer).settings.wire_options == {"iggy": b"x"}


@pytest.mark.parametrize("version", range(1, 6))
def test_one_directory_holds_everything(peer: Dialogue, version: int) -> None:
    (every,) = peer.ask(Api.DESCRIBE_LOG_DIRS, version, topics=None).results
    assert [(topic.name, [one.index for one in topic.partitions]) for topic in every.topics] == [("orders", [0])]
    assert every.total_bytes > 0 or version < 4
    asked = schema.request(Api.DESCRIBE_LOG_DIRS).Topics(topic="orders", partitions=[0, 7])
    (one,) = peer.ask(Api.DESCRIBE_LOG_DIRS, version, topics=[asked]).results
    assert [entry.index for entry in one.topics[0].partitions] == [0]
    assert not peer.ask(Api.DESCRIBE_LOG_DIRS, version, topics=[]).results[0].topics


@pytest.mark.parametrize("version", range(7))
def test_the_broker_coordinates_everything(peer: Dialogue, version: int) -> None:
    fields = {"key": "g"} if version < 4 else {"coordinator_keys": ["g", "h"]}
    reported = peer.ask(Api.FIND_COORDINATOR, version, **fields)
    found = [reported] if version < 4 else list(reported.coordinators)
    assert [(one.error, one.node_id, one.host, one.port) for one in found] == [(0, 1, "127.0.0.1", 9094)] * len(found)
    if version:
        reported = peer.ask(Api.FIND_COORDINATOR, version, key_type=2, **fields)
        errors = [reported.error] if version < 4 else [one.error for one in reported.coordinators]
        assert set(errors) == {WireError.INVALID_REQUEST}


def test_only_brokers_have_endpoints(peer: Dialogue) -> None:
    assert peer.ask(Api.DESCRIBE_CLUSTER, 1, endpoint_type=1).error == 0
    assert peer.ask(Api.DESCRIBE_CLUSTER, 1, endpoint_type=2).error == WireError.INVALID_REQUEST
