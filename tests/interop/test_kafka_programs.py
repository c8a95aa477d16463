"""Unmodified programs built on Kafka's clients: kcat, Kafka's tools, Kafka Connect and Kafka Streams.

None of them is part of this project. ``POLYWIRE_KAFKA_KCAT`` names kcat, ``POLYWIRE_KAFKA_TOOLS`` a class path with Kafka's tools, Connect's
runtime and its file connectors, and Streams (spec: kafka#clients-to-test-with). Missing ones are skipped with a reason.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest

from polywire.client.sync import connect
from polywire.records.columns import Record
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.three_brokers import Brokers, one_or_three

SECONDS_MAX = 120.0  # many run on few processors
DRIVER = Path(__file__).parent / "kafka" / "WordCount.java"
KCAT, TOOLS = "POLYWIRE_KAFKA_KCAT", "POLYWIRE_KAFKA_TOOLS"
QUIET = ("-Xmx384m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
FILES = "org.apache.kafka.connect.file."  # package of the file connectors


@pytest.fixture(scope="module")
def kcat() -> str:
    return os.environ.get(KCAT) or pytest.skip(f"{KCAT} is not set: the Kafka wire was NOT tried with kcat")


@pytest.fixture(scope="module")
def tools() -> str:
    if which("java") is None:
        pytest.skip("java is missing: the Kafka wire was NOT tried with Kafka's tools, Connect and Streams")
    return os.environ.get(TOOLS) or pytest.skip(
        f"{TOOLS} is not set: the Kafka wire was NOT tried with Kafka's tools, Connect and Streams"
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Brokers]:
    with one_or_three(tmp_path, wires=["kafka", "polywire"]) as process:
        yield process


def address(broker: Brokers) -> str:
    return "{}:{}".format(*broker.addresses["kafka"])


def run(*command: str, given: str = "", code: int = 0) -> str:
    """Return a program's output until it ends."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == code, (
        f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )
    return done.stdout


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that is killed at the end."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Wait for something that a program does at its own pace."""
    end = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < end, f"did not happen in {SECONDS_MAX} s: {what()}"
        time.sleep(0.2)


def properties(path: Path, values: Mapping[str, object]) -> str:
    """Write a file of settings."""
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return str(path)


# kcat


def test_kcat_writes_and_reads(kcat: str, broker: Brokers) -> None:
    with connect(broker.url()) as client:
        client.create_topic("orders", 1)
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        words = ("-P", "-t", "orders", "-K", ":", "-H", f"codec={codec}", "-z", codec, "-Z")
        run(kcat, "-b", address(broker), *words, given=f"{codec}:one\n{codec}:two\n{codec}:\n")
    reported = run(
        kcat, "-b", address(broker), "-C", "-t", "orders", "-e", "-q", "-f", "%o %k %S %s %h\\n"
    ).splitlines()
    assert reported[:3] == ["0 none 3 one codec=none", "1 none 3 two codec=none", "2 none -1  codec=none"]
    assert [line.split()[1] for line in reported[::3]] == ["none", "gzip", "snappy", "lz4", "zstd"]
    assert len(reported) == 15
    assert '"orders" with 1 partitions' in run(kcat, "-b", address(broker), "-L").replace("topic ", "")
    assert "offset 15" in run(kcat, "-b", address(broker), "-Q", "-t", "orders:0:-1")


def test_kcat_reads_as_a_group(kcat: str, broker: Brokers) -> None:
    with connect(broker.url()) as client:
        for topic in ("one", "two"):
            client.create_topic(topic, 2)
            client.produce(topic, [Record(value=b"v%d" % number) for number in range(10)], partition=1)
    read = ("-b", address(broker), "-G", "g", "-X", "auto.offset.reset=earliest", "-q", "-f", "%t %s\\n")
    reported = run(kcat, *read, "-c", "20", "one", "two").splitlines()
    assert sorted(reported) == sorted(f"{topic} v{number}" for topic in ("one", "two") for number in range(10))
    with connect(broker.url("kafka")) as client:
        assert [client.position("g", topic, 1) for topic in ("one", "two")] == [10, 10]


def test_kcat_reads_as_a_group_over_a_kill(kcat: str, broker: Brokers, tmp_path: Path) -> None:
    """It does not have to rejoin, so nothing is read twice."""

    def produce(first: int) -> None:
        with connect(broker.url()) as client:
            for partition in (0, 1):
                numbers = range(first + partition, first + 20, 2)
                client.produce("orders", [Record(value=b"v%d" % number) for number in numbers], partition=partition)

    def reported() -> list[str]:
        return said.read_text().split()

    with connect(broker.url()) as client:
        client.create_topic("orders", 2)
    produce(0)
    said = tmp_path / "said"
    words = ("-E", "-G", "g", "-X", "auto.offset.reset=earliest", "-q", "-u", "-f", "%s\\n", "-c", "40", "orders")
    with said.open("wb") as output, subprocess.Popen([kcat, "-b", address(broker), *words], stdout=output) as process:
        try:
            until(lambda: len(reported()) == 20, reported)
            broker.kill()
            broker.start()
            produce(20)
            assert process.wait(SECONDS_MAX) == 0
        finally:
            process.kill()
    assert sorted(reported()) == sorted(f"v{number}" for number in range(40))


# Kafka's own tools


def test_tools(tools: str, broker: Brokers, tmp_path: Path) -> None:
    def tool(name: str, *words: str) -> str:
        return run("java", *QUIET, "-cp", tools, name, "--bootstrap-server", address(broker), *words)

    topics, groups = "org.apache.kafka.tools.TopicCommand", "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    tool(topics, "--create", "--topic", "orders", "--partitions", "2", "--config", "retention.ms=1000000000")
    tool(topics, "--alter", "--topic", "orders", "--partitions", "3")
    assert "orders" in tool(topics, "--list").splitlines()
    described = tool(topics, "--describe", "--topic", "orders")
    assert "PartitionCount: 3" in described
    assert "retention.ms=1000000000" in described
    reported = tool(
        "org.apache.kafka.tools.VerifiableProducer", "--topic", "orders", "--max-messages", "300", "--acks", "-1"
    )
    assert reported.count('"name":"producer_send_success"') == 300
    offsets = tool("org.apache.kafka.tools.GetOffsetShell", "--topic", "orders").split()
    assert sum(int(line.split(":")[2]) for line in offsets) == 300
    reported = tool(
        "org.apache.kafka.tools.TransactionsCommand", "describe-producers", "--topic", "orders", "--partition", "0"
    )
    written = int(offsets[0].split(":")[2])
    (producer,) = reported.splitlines()[1:] or [""]
    assert producer.split()[3:4] == ([str(written - 1)] if written else []), "its sequences count records from 0"
    reported = tool(
        "org.apache.kafka.tools.VerifiableConsumer", "--topic", "orders", "--group-id", "g", "--max-messages", "300"
    )
    assert '"name":"offsets_committed"' in reported
    described = tool(groups, "--describe", "--group", "g")
    lags = [line.split() for line in described.splitlines() if line.startswith("g ")]
    assert sum(int(line[3]) for line in lags) == 300
    assert {line[5] for line in lags} == {"0"}, "a group that has read everything has no lag"
    newer = ("--command-property", "group.protocol=consumer", "--timeout-ms", "60000")
    reported = tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "--include",
        "ord.+",
        "--group",
        "p",
        "--from-beginning",
        "--max-messages",
        "300",
        *newer,
    )
    assert len(reported.split()) == 300
    tool(groups, "--reset-offsets", "--to-earliest", "--group", "g", "--topic", "orders", "--execute")
    with connect(broker.url("kafka")) as client:
        assert [client.position("g", "orders", number) for number in range(3)] == [0, 0, 0]
    assert "successful" in tool(groups, "--delete", "--group", "g")


def test_tools_set_the_password_of_a_user(tools: str, tmp_path: Path) -> None:
    """A user created by a tool can log in, has no permissions yet, and is deleted with the last password."""
    users = tmp_path / "users"
    add_user(users, "admin", "admin-secret", "all")
    module = "org.apache.kafka.common.security.{}LoginModule required username={} password={};"
    common = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
    login = module.format("plain.Plain", '"admin"', '"admin-secret"')
    admin = properties(tmp_path / "admin", common | {"sasl.jaas.config": login})
    login = module.format("scram.Scram", '"ann"', '"ann-secret"')
    ann = properties(tmp_path / "ann", {**common, "sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": login})
    with BrokerProcess(tmp_path / "data", "--users", str(users), wires=["kafka"]) as broker:

        def tool(name: str, config: str, *words: str, code: int = 0) -> str:
            words = ("--bootstrap-server", address(broker), "--command-config", config, *words)
            return run("java", *QUIET, "-cp", tools, name, *words, code=code)

        entity = ("--entity-type", "users", "--entity-name", "ann")
        change = ("kafka.admin.ConfigCommand", admin, "--alter", *entity)
        topics = "org.apache.kafka.tools.TopicCommand"
        tool(*change, "--add-config", "SCRAM-SHA-512=[iterations=8192,password=ann-secret]")
        assert "SCRAM-SHA-512=iterations=8192" in tool(
            "kafka.admin.ConfigCommand", admin, "--describe", "--entity-type", "users"
        )
        broker.kill()
        broker.start()
        refused = tool(topics, ann, "--create", "--topic", "orders", code=1)
        assert "not allowed" in refused, "the login was right"
        tool(*change, "--delete-config", "SCRAM-SHA-512")
        assert "ann" not in tool("kafka.admin.ConfigCommand", admin, "--describe", "--entity-type", "users")


# Kafka Connect


def test_connect_standalone(tools: str, broker: Brokers, tmp_path: Path) -> None:
    """A file is copied to a topic and to a file, through a kill of the broker; then the worker resumes where it was."""
    source, sink = tmp_path / "source.txt", tmp_path / "sink.txt"
    text = "org.apache.kafka.connect.storage.StringConverter"
    worker = {
        "bootstrap.servers": address(broker),
        "key.converter": text,
        "value.converter": text,
        "offset.storage.file.filename": tmp_path / "offsets",
        "offset.flush.interval.ms": 500,
        "listeners": "http://127.0.0.1:0",
        "plugin.discovery": "only_scan",
    }
    common = {"tasks.max": 1}
    reading = {"name": "in", "connector.class": FILES + "FileStreamSourceConnector", "file": source, "topic": "lines"}
    writing = {"name": "out", "connector.class": FILES + "FileStreamSinkConnector", "file": sink, "topics": "lines"}
    words = (
        properties(tmp_path / "worker.properties", worker),
        properties(tmp_path / "in.properties", reading | common),
        properties(tmp_path / "out.properties", writing | common),
    )
    lines = [f"line {number}" for number in range(100)]

    def written() -> list[str]:
        return sink.read_text().splitlines() if sink.exists() else []

    def grown(count: int) -> None:
        with source.open("a") as file:
            file.writelines(f"{line}\n" for line in lines[count - 50 : count])
        until(lambda: set(written()) >= set(lines[:count]), lambda: len(written()))

    command = ("java", *QUIET, "-cp", tools, "org.apache.kafka.connect.cli.ConnectStandalone", *words)
    with running(*command):
        grown(50)
        broker.kill()
        broker.start()
        grown(100)
    assert set(written()) == set(lines)
    with connect(broker.url()) as client:
        count = len(client.bounds("lines"))
        stored = [record.value for number in range(count) for record in client.fetch("lines", number, 0)]
    assert sorted(value or b"" for value in stored) == sorted(line.encode() for line in lines), (
        "every line is in the topic once"
    )


# Kafka Streams


def test_streams_count_words_exactly_once(tools: str, broker: Brokers, tmp_path: Path) -> None:
    """The broker is killed, then the application with its state, which is restored from its changelog."""
    if which("javac") is None:
        pytest.skip("javac is missing: the Kafka wire was NOT tried with Kafka Streams")
    run("javac", "-d", str(tmp_path), "-cp", tools, str(DRIVER))
    with connect(broker.url()) as client:
        for topic, partitions in (("text", 2), ("counts", 1)):
            client.create_topic(topic, partitions)

    def say(first: int, last: int) -> None:
        with connect(broker.url()) as client:
            for number in range(first, last):
                client.produce("text", [Record(value=f"every word{number % 5}".encode())], partition=number % 2)

    def counted() -> dict[str, list[int]]:
        """Return the committed counts of each word, in order."""
        found: dict[str, list[int]] = {}
        with connect(broker.url()) as client:
            for record in client.fetch("counts", 0, 0):
                found.setdefault((record.key or b"").decode(), []).append(int(record.value or b"0"))
        return found

    def reached(count: int) -> bool:
        return counted().get("every", [0])[-1] >= count

    def command(life: int) -> list[str]:
        words = [address(broker), "text", "counts", str(tmp_path / f"state-{life}")]
        return ["java", *QUIET, "-cp", f"{tmp_path}{os.pathsep}{tools}", "WordCount", *words]

    with running(*command(1)):
        say(0, 50)
        until(lambda: reached(50), counted)
        broker.kill()
        broker.start()
        say(50, 100)
        until(lambda: reached(100), counted)
    with running(*command(2)):
        say(100, 150)
        until(lambda: reached(150), counted)
    found = counted()
    assert {word: counts[-1] for word, counts in found.items()} == {"every": 150} | {f"word{n}": 30 for n in range(5)}
    assert all(counts == sorted(set(counts)) for counts in found.values()), "no count is repeated or goes back"
