"""Options under Kafka's names, and errors that suggest the intended option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polywire.client.address import PASSWORD_VARIABLE, Login
from polywire.errors import Invalid
from polywire.spark.offsets import PartitionKey
from polywire.spark.options import (
    ByOffset,
    ByTime,
    Edge,
    Headers,
    MissingTime,
    SourceOptions,
    TimestampType,
    read_options,
    write_options,
)
from polywire.spark.pipelines import project

BASE = {"address": "localhost:7660", "subscribe": "orders"}


def read(*, streaming: bool = False, **given: str) -> SourceOptions:
    return read_options({**BASE, **given}, streaming=streaming)


def test_defaults_match_kafkas_source() -> None:
    batch, stream = read(), read(streaming=True)
    assert (batch.starting, batch.ending) == (Edge.EARLIEST, Edge.LATEST)
    assert stream.starting is Edge.LATEST
    assert batch.fail_on_data_loss
    assert batch.headers is Headers.NONE
    assert batch.trigger_records_max is None
    assert stream.trigger_delay_s == 900.0


@pytest.mark.parametrize("name", ["address", "bootstrap.servers", "kafka.bootstrap.servers", "KAFKA.Bootstrap.Servers"])
def test_every_option_name_of_the_address(name: str) -> None:
    options = read_options({name: "a:1, polywire://b:2", "subscribe": "t"}, streaming=False)
    assert options.addresses == ("a:1", "polywire://b:2")


def test_the_default_address_is_the_local_broker() -> None:
    assert read_options({"subscribe": "t"}, streaming=False).addresses == ("127.0.0.1:9555",)


def test_options_of_kafkas_consumer_are_accepted_without_effect() -> None:
    given = {"kafkaConsumer.pollTimeoutMs": "512", "fetchOffset.numRetries": "3", "groupIdPrefix": "g"}
    assert read_options({**BASE, **given}, streaming=True) == read(streaming=True)
    for name in ("kafka.group.id", "commitGroup"):
        assert read_options({**BASE, name: "g"}, streaming=True).group == "g"


def test_timeouts_can_be_raised_but_not_lowered() -> None:
    given = {
        "kafkaConsumer.pollTimeoutMs": "300000",
        "fetchOffset.numRetries": "600",
        "fetchOffset.retryIntervalMs": "100",
    }
    patient = read_options({**BASE, **given}, streaming=True)
    assert (patient.timeout_s, patient.reconnect_s) == (300.0, 60.0)


def test_timestamps_are_append_times_unless_create_times_are_requested() -> None:
    assert read().timestamp_type is TimestampType.APPEND
    assert read(timestampType="LogAppendTime").timestamp_type is TimestampType.APPEND
    assert read(streaming=True, timestampType="createtime").timestamp_type is TimestampType.CREATE
    with pytest.raises(Invalid, match="choose one of the two"):
        read(timestampType="CreateTime", pushFilters="oneQueryPerLoad")


def test_subscriptions() -> None:
    assert read(subscribe="b, a,b").subscription.topics == ("a", "b")
    pattern = read_options({"address": "a:1", "subscribePattern": "or.*"}, streaming=False)
    assert pattern.subscription.pattern == "or.*"
    assigned = read_options({"address": "a:1", "assign": '{"b":[1,0],"a":[2]}'}, streaming=False)
    assert assigned.subscription.partitions == (("a", 2), ("b", 0), ("b", 1))


def test_times_that_do_not_fit_are_after_all_records() -> None:
    largest = 2**63 - 1
    assert read(startingTimestamp=str(largest)).starting == ByTime(largest, {})
    many = read(startingOffsetsByTimestamp=json.dumps({"orders": {"0": largest}}))
    assert many.starting == ByTime(None, {PartitionKey("orders", 0): largest})


def test_offset_options() -> None:
    assert read(startingOffsets="Earliest").starting is Edge.EARLIEST
    assert read(startingOffsets='{"orders":{"0":23,"1":-2}}').starting == ByOffset(
        {PartitionKey("orders", 0): 23, PartitionKey("orders", 1): -2}
    )
    assert read(endingOffsets='{"orders":{"0":-1}}').ending == ByOffset({PartitionKey("orders", 0): -1})
    by_time = read(startingOffsetsByTimestamp='{"orders":{"0":5}}', startingOffsets="earliest").starting
    assert by_time == ByTime(None, {PartitionKey("orders", 0): 5000})
    first = read(startingTimestamp="7", startingOffsetsByTimestamp='{"orders":{"0":5}}')
    assert first.starting == ByTime(7000, {})
    assert first.missing_time is MissingTime.ERROR
    assert read(startingOffsetsByTimestampStrategy="latest").missing_time is MissingTime.LATEST


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30.0), ("15m", 900.0), ("2h", 7200.0), ("250", 0.25)]
)
def test_durations(text: str, seconds: float) -> None:
    assert read(maxTriggerDelay=text).trigger_delay_s == seconds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"startingOfsets": "earliest"}, "did you mean 'startingOffsets'"),
        ({"max.offsets.per.trigger": "3"}, "did you mean 'maxOffsetsPerTrigger'"),
        ({"colour": "red"}, "unknown option option='colour'"),
        ({"kafka.security.protocol": "SSL"}, "has no meaning here"),
        ({"group.id": "g"}, "set commitGroup to show them"),
        ({"kafka.auto.offset.reset": "earliest"}, "set startingOffsets"),
        ({"kafka.enable.auto.commit": "true"}, "keeps its positions in its checkpoint"),
        ({"kafka.key.deserializer": "x"}, "cast the columns"),
        ({"kafka.interceptor.classes": "x"}, "is not supported"),
        ({"commitGroup": "a", "kafka.group.id": "b"}, "given twice"),
        ({"commitGroup": "g" * 256}, "must have 1 to 255 bytes"),
        ({"pushFilters": "true"}, "load one for each query"),
        ({"pushFilters": "maybe"}, "must be false or oneQueryPerLoad"),
        ({"includeHeaders": "maybe"}, "must be true, typed or false|must be false, true or typed"),
        ({"path": "/x"}, "subscribe"),
        ({"assign": '{"a":[0]}'}, "exactly one of the options subscribe, subscribePattern, assign"),
        ({"bootstrap.servers": "a:1"}, "more than once"),
        ({"address": "localhost"}, "must be host:port"),
        ({"address": "localhost:0"}, "must be host:port"),
        ({"address": " , "}, "is empty"),
        ({"subscribe": " ,"}, "names no topic"),
        ({"startingOffsets": "latest"}, "cannot be latest"),
        ({"startingOffsets": '{"orders":{"0":-1}}'}, "cannot be latest"),
        ({"startingOffsets": "oldest"}, "earliest, latest, or JSON"),
        ({"startingOffsets": '{"orders":{"0":"3"}}'}, "wrong at 'orders' partition '0'"),
        ({"startingOffsets": '{"orders":{"0":-3}}'}, "wrong at 'orders'"),
        ({"startingOffsets": '{"orders":{"x":3}}'}, "wrong at 'orders' partition 'x'"),
        ({"startingOffsets": '{"orders":{"0":true}}'}, "wrong at 'orders'"),
        ({"startingOffsets": "{}"}, "must be"),
        ({"startingOffsets": "[1]"}, "must be"),
        ({"endingOffsets": "earliest"}, "cannot be earliest"),
        ({"endingOffsets": '{"orders":{"0":-2}}'}, "cannot be earliest"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp must be a whole number"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "must be error or latest"),
        ({"failOnDataLoss": "no"}, "must be true or false"),
        ({"minPartitions": "0"}, "above 0"),
        ({"maxOffsetsPerTrigger": "1.5"}, "above 0"),
        ({"maxTriggerDelay": "soon"}, "such as 500ms"),
    ],
)
def test_errors_suggest_the_intended_option(given: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        read_options({**BASE, **given}, streaming=False)


def test_a_broken_pattern_is_refused() -> None:
    with pytest.raises(Invalid, match="not a regular expression"):
        read_options({"address": "a:1", "subscribePattern": "("}, streaming=False)


def test_an_assignment_needs_partitions() -> None:
    for text in ('{"a":[]}', '{"a":0}', '{"a":[-1]}', "a"):
        with pytest.raises(Invalid, match="assign"):
            read_options({"address": "a:1", "assign": text}, streaming=False)


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    with pytest.raises(Invalid, match="a stream has no end"):
        read(streaming=True, **{name: "1"})


@pytest.mark.parametrize(
    ("given", "env", "name", "password"),
    [
        ({"user": "u", "password": "quite-secret"}, None, "u", "quite-secret"),
        ({"USER": "u", "Password": "quite-secret"}, "other", "u", "quite-secret"),
        ({"user": "u"}, "from outside", "u", "from outside"),
        ({"address": "u@h:1"}, "quite-secret", "u", "quite-secret"),
        (
            {"address": "polywire+tls://u@h:1,polywire+tls://u@h:2", "password": "quite-secret"},
            None,
            "u",
            "quite-secret",
        ),
    ],
)
def test_login_options_and_the_password_variable(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], env: str | None, name: str, password: str
) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    if env is not None:
        monkeypatch.setenv(PASSWORD_VARIABLE, env)
    for options in (
        read_options({"subscribe": "t", **given}, streaming=True),
        write_options({"topic": "t", **given}, streaming=True),
    ):
        assert options.login == Login(name, password)
        assert "@" not in "".join(options.addresses)
        assert password not in repr(options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"password": "secret"}, "the option password needs the option user"),
        ({"user": "u"}, "needs the option password, or the variable POLYWIRE_PASSWORD"),
        ({"address": "u:secret@h:1"}, "must not contain a password, because Spark shows it"),
        ({"address": "u:secret@h"}, "must not contain a password, because Spark shows it"),
        ({"passwrod": "secret"}, "did you mean 'password'"),
        ({"user": "u", "password": "secret", "address": "h"}, "must be host:port"),
    ],
)
def test_errors_about_a_login_do_not_show_it(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str
) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with pytest.raises(Invalid) as caught:
        read_options({"subscribe": "t", **given}, streaming=True)
    assert message in caught.value.message
    assert "secret" not in caught.value.message


def test_projects_must_not_contain_a_password(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="passwords are not written to files") as caught:
        project.make(tmp_path / "made", topic="t", address="a:secret@h:1")
    assert "secret" not in caught.value.message
    assert not (tmp_path / "made").exists()
