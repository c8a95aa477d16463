"""The ``polywire`` command against a real broker, in separate processes, as users and scripts run it."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import Unavailable
from polywire.records.columns import Record
from tests import fork_server
from tests.broker_process import BrokerProcess, child_environment
from tests.e2e.followed_page import PROGRESS

COMMAND: Final = (sys.executable, "-m", "polywire")
COMMAND_SECONDS_MAX: Final = 120.0
_topic_numbers = count(1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("cli") / "data", "--any", "127.0.0.1:0") as process:
        yield process


@pytest.fixture
def topic() -> str:
    return f"orders-{next(_topic_numbers)}"


class Command:
    """Runs commands against one broker."""

    def __init__(self, address: str) -> None:
        self._environment = child_environment() | {"POLYWIRE_ADDRESS": address, "COLUMNS": "80"}

    def __call__(self, *words: str, typed: str | bytes = b"", code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run to the end with this standard input, and check the exit code."""
        done = fork_server.run(
            [*COMMAND, *words],
            input=typed.encode() if isinstance(typed, str) else typed,
            timeout=COMMAND_SECONDS_MAX,
            env=self._environment,
        )
        assert done.returncode == code, done.stderr.decode()
        # On a busy machine a command may wait for its broker, and reports that.
        messages = [line for line in done.stderr.decode().splitlines(True) if not PROGRESS.match(line)]
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), "".join(messages))

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command that keeps running."""
        pipe = subprocess.PIPE
        return subprocess.Popen([*COMMAND, *words], stdin=pipe, stdout=pipe, stderr=pipe, env=self._environment)


@pytest.fixture
def command(broker: BrokerProcess) -> Command:
    return Command(broker.url("polywire"))


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def values(text: str) -> list[Any]:
    return [fields["value"] for fields in objects(text)]


def produce_numbers(command: Command, topic: str, numbers: range) -> None:
    lines = "".join(f'{{"key": "k", "value": "{number}"}}\n' for number in numbers)
    command("record", "produce", topic, typed=lines)


def test_topics_are_created_listed_described_and_deleted(command: Command, topic: str) -> None:
    assert command("topic", "create", topic, "--partitions", "2").stderr == f"created topic={topic} partitions=2\n"
    command("record", "produce", topic, "--partition", "1", "--format", "raw", typed="a\nb\n")
    listed = objects(command("topic", "list", "--output", "jsonl").stdout)
    assert {"topic": topic, "partitions": 2, "records": 2} in listed
    assert json.loads(command("topic", "list", "--output", "json").stdout) == listed
    table = [line.split() for line in command("topic", "list").stdout.splitlines()]
    assert table[0] == ["topic", "partitions", "records"]
    assert [topic, "2", "2"] in table
    described = list(csv.DictReader(io.StringIO(command("topic", "describe", topic, "-o", "csv").stdout)))
    assert [row["next_offset"] for row in described] == ["0", "2"]
    assert command("topic", "delete", topic, "--dry-run").stderr == f"would delete topic={topic} records=2\n"
    assert topic in command("topic", "list").stdout
    assert command("topic", "delete", topic).stderr == f"deleted topic={topic} records=2\n"
    assert topic not in command("topic", "list").stdout
    assert "code=topic_missing" in command("topic", "describe", topic, code=1).stderr
    assert "code=topic_missing" in command("topic", "delete", topic, code=1).stderr


def test_topics_are_altered(command: Command, topic: str) -> None:
    command("topic", "create", topic, "-p", "2", "--retention-hours", "2", "--compaction")
    words = ("topic", "alter", topic, "-p", "3", "--retention-hours", "1", "--no-compaction", "--output", "jsonl")
    would = command(*words, "--dry-run")
    expected = [("partitions", 2, 3), ("compaction", 1, 0), ("retention_age_us", 7_200_000_000, 3_600_000_000)]
    assert [(row["setting"], row["before"], row["after"]) for row in objects(would.stdout)] == expected
    assert would.stderr == f"would alter topic={topic} settings=3\n"
    done = command(*words)
    assert (done.stdout, done.stderr) == (would.stdout, f"altered topic={topic} settings=3\n")
    again = objects(command(*words, "--dry-run").stdout)
    assert [row["before"] for row in again] == [row["after"] for row in again]
    assert "nothing to change" in command("topic", "alter", topic, code=1).stderr
    assert "code=invalid_partition_count" in command("topic", "alter", topic, "-p", "1", code=1).stderr
    assert "code=topic_missing" in command("topic", "alter", f"{topic}-none", "-p", "9", code=1).stderr


def test_creating_an_existing_topic_or_an_invalid_name_fails(command: Command, topic: str) -> None:
    command("topic", "create", topic)
    assert "code=topic_exists" in command("topic", "create", topic, code=1).stderr
    assert "code=invalid_topic" in command("topic", "create", "a\nb", code=1).stderr
    assert "code=invalid_partition_count" in command("topic", "create", f"{topic}-b", "-p", "0", code=1).stderr


def test_a_topic_can_have_a_name_of_several_words(command: Command) -> None:
    command("topic", "create", "größe der Aufträge: 5 %")
    assert "größe der Aufträge: 5 %" in command("topic", "list").stdout


def test_settings_of_a_topic_are_set_and_shown(broker: BrokerProcess, command: Command, topic: str) -> None:
    given = ("--compaction", "--compression", "lz4", "--retention-hours", "1.5", "--retention-mib", "2")
    kept = "compaction=1 compression=lz4 retention_age_us=5400000000 retention_bytes=2097152"
    made = command("topic", "create", topic, *given, "--key-hash", "xxh32").stderr
    assert made == f"created topic={topic} partitions=3 {kept} key_hash=xxh32\n"
    reported = command("topic", "describe", topic).stderr.split()
    assert {f"topic={topic}", *kept.split(), "key_hash=xxh32"} <= set(reported)
    plain = command("topic", "create", f"{topic}-b", "-a", broker.url("flux")).stderr
    assert plain == f"created topic={topic}-b partitions=3\n"
    refused = command("topic", "create", f"{topic}-c", "--compaction", "-a", broker.url("flux"), code=1).stderr
    assert "only the polywire protocol can set topic settings" in refused


def test_flux_lists_topics_without_counting_records(broker: BrokerProcess, command: Command, topic: str) -> None:
    address = broker.url("flux")
    command("topic", "create", topic, "-p", "5", "-a", address)
    listed = objects(command("topic", "list", "-o", "jsonl", "-a", address).stdout)
    assert {"topic": topic, "partitions": 5, "records": None} in listed
    assert "code=invalid_request" in command("record", "consume", topic, "-a", address, code=1).stderr


def test_json_lines_round_trip(command: Command, topic: str) -> None:
    typed = "\n".join(
        [
            '{"key": "a", "value": "hello"}',
            "",
            '{"value": {"nested": [1, 2]}, "key": "a"}',
            '{"key": "a", "value_base64": "/w==", "headers": {"h": "x"}}',
            '{"key": "a"}',
        ]
    )
    assert command("record", "produce", topic, typed=typed).stderr == f"produced topic={topic} records=4\n"
    printed = command("record", "consume", topic).stdout
    assert [fields["offset"] for fields in objects(printed)] == [0, 1, 2, 3]
    command("record", "produce", f"{topic}-copy", typed=printed)
    copied = objects(command("record", "consume", f"{topic}-copy").stdout)
    own = ("key", "value", "value_base64", "headers")
    assert [[fields.get(name) for name in own] for fields in copied] == [
        ["a", "hello", None, None],
        ["a", '{"nested":[1,2]}', None, None],
        ["a", None, "/w==", [{"key": "h", "value": "x"}]],
        ["a", None, None, None],
    ]


def test_raw_lines_round_trip(command: Command, topic: str) -> None:
    text = 'plain\n\n{"not": json\n  spaces \r\nlast'
    command("record", "produce", topic, "--format", "raw", "--key", "k", typed=text)
    assert command("record", "consume", topic, "--format", "raw").stdout.encode() == text.encode() + b"\n"
    assert {fields["key"] for fields in objects(command("record", "consume", topic).stdout)} == {"k"}


def test_an_invalid_line_stops_the_command_and_earlier_lines_are_stored(command: Command, topic: str) -> None:
    refused = command(
        "record", "produce", topic, typed='{"value": "1"}\n\n{"value": "3"}\nfour\n{"value": "5"}\n', code=1
    )
    assert refused.stderr.splitlines()[0] == f"stopped after an error topic={topic} records_produced=2"
    assert refused.stderr.splitlines()[1].startswith("error: line is not JSON (use --format raw for plain lines)")
    assert refused.stderr.splitlines()[1].endswith("line=4 code=invalid_request")
    assert values(command("record", "consume", topic).stdout) == ["1", "3"]


def test_start_positions_of_consume(command: Command, topic: str) -> None:
    command("topic", "create", topic, "-p", "1")
    produce_numbers(command, topic, range(5))
    time.sleep(0.01)
    produce_numbers(command, topic, range(5, 8))
    everything = objects(command("record", "consume", topic, "--from", "earliest").stdout)
    assert [fields["value"] for fields in everything] == [str(number) for number in range(8)]
    moment = everything[5]["timestamp"]
    for start, expected in (("latest", []), ("6", ["6", "7"]), (moment, ["5", "6", "7"]), ("99", [])):
        done = command("record", "consume", topic, "--from", start)
        assert values(done.stdout) == expected
        assert bool(done.stderr) is not bool(expected), "an empty result is explained"
    beyond = command("record", "consume", topic, "--from", "99").stderr
    assert beyond == f"no records to read: every partition ends before offset=99 topic={topic} next_offset=8\n"
    assert values(command("record", "consume", topic, "--from", "2", "--count", "3").stdout) == ["2", "3", "4"]
    assert "code=partition_missing" in command("record", "consume", topic, "-p", "9", code=1).stderr
    assert "code=topic_missing" in command("record", "consume", f"{topic}-none", code=1).stderr


def test_tail_prints_new_records_until_interrupted(command: Command, topic: str) -> None:
    command("topic", "create", topic)
    produce_numbers(command, topic, range(3))
    with command.start("record", "tail", topic, "--format", "raw") as tail:
        assert tail.stdout is not None
        try:
            _produce_until(lambda number: produce_numbers(command, topic, range(number, number + 1)), tail)
            following = tail.stdout.readline()
            assert int(following) >= 1000, "tail starts at the end of the topic"
        finally:
            tail.send_signal(signal.SIGINT)
        assert tail.wait(COMMAND_SECONDS_MAX) == 130


def _produce_until(produce: Callable[[int], None], tail: subprocess.Popen[bytes]) -> None:
    """Produce numbers from 1000 on until tail, which starts at an unknown moment, has something to read."""
    assert tail.stdout is not None
    for number in range(1000, 1020):
        produce(number)
        os.set_blocking(tail.stdout.fileno(), False)
        if tail.stdout.peek():  # type: ignore[attr-defined]
            os.set_blocking(tail.stdout.fileno(), True)
            return
    raise AssertionError("nothing arrived")


def test_following_ends_after_count_records(command: Command, topic: str) -> None:
    produce_numbers(command, topic, range(3))
    found = command("record", "consume", topic, "--follow", "--count", "3").stdout
    assert values(found) == ["0", "1", "2"]


def test_a_reader_that_closes_the_pipe_is_no_error(command: Command, topic: str) -> None:
    produce_numbers(command, topic, range(30_000))
    with command.start("record", "consume", topic) as consume:
        assert consume.stdout is not None
        assert consume.stderr is not None
        assert json.loads(consume.stdout.readline())["value"] == "0"
        consume.stdout.close()
        assert consume.wait(COMMAND_SECONDS_MAX) == 0
        assert consume.stderr.read() == b""


def test_writers_and_transactional_ids_are_listed_and_deleted(broker: BrokerProcess, command: Command) -> None:
    async def publish() -> None:
        client = await connect(broker.url("polywire"))
        assert isinstance(client, PolywireClient)
        for _ in range(2):
            epoch = await client.begin_epoch("nightly/totals")
        await client.publish("nightly/totals", 7, [], epoch=epoch)
        await client.close()

    asyncio.run(publish())
    (found,) = objects(command("writer", "list", "--output", "jsonl").stdout)
    assert (found["writer"], found["epoch"], found["number"], found["owner"]) == ("nightly/totals", 2, 7, "")
    assert command("writer", "list", "-o", "csv").stdout.startswith("writer,epoch,number,idle_ms,owner\n")
    would = command("writer", "delete", "nightly/totals", "--dry-run").stderr
    assert would == "would delete writer=nightly/totals number=7\n"
    assert command("writer", "delete", "nightly/totals").stderr == "deleted writer=nightly/totals number=7\n"
    assert "no such writer writer='nightly/totals'" in command("writer", "delete", "nightly/totals", code=1).stderr
    assert command("transaction", "list", "-o", "jsonl").stdout == ""
    assert "no such transactional id transactional_id='x'" in command("transaction", "delete", "x", code=1).stderr
    flux = ("-a", broker.url("flux"))
    assert (
        "only the polywire protocol can list transactional ids" in command("transaction", "list", *flux, code=1).stderr
    )


def test_an_interrupt_is_not_delayed_by_a_silent_writer(command: Command, topic: str) -> None:
    with command.start("record", "produce", topic) as produce:
        assert produce.stdin is not None
        assert produce.stderr is not None
        produce.stdin.write(b'{"key": "k", "value": "one"}\n')
        produce.stdin.flush()
        _wait_for(lambda: topic in command("topic", "list").stdout)
        produce.send_signal(signal.SIGINT)
        assert produce.wait(COMMAND_SECONDS_MAX) == 130
        assert produce.stderr.read() == b""
    assert values(command("record", "consume", topic).stdout) == ["one"]


def _wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + COMMAND_SECONDS_MAX
    while not true():
        assert time.monotonic() < end, "the condition was not reached in time"


def test_following_fails_when_the_broker_dies(tmp_path: Path, topic: str) -> None:
    with BrokerProcess(tmp_path / "data") as own:
        command = Command(own.url("polywire"))
        produce_numbers(command, topic, range(1))
        with command.start("record", "consume", topic, "--follow") as follow:
            assert follow.stdout is not None
            assert follow.stderr is not None
            follow.stdout.readline()
            own.kill()
            assert follow.wait(COMMAND_SECONDS_MAX) == 1
            message = follow.stderr.read().decode()
            assert message.startswith("error: connection lost")
            assert message.count("\n") == 1


def test_connection_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYWIRE_CONNECT_S", "0")
    refused = Command("polywire://127.0.0.1:1")("topic", "list", code=1)
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: cannot connect: connection refused (check that a broker is running there)")
    assert refused.stderr.rstrip().endswith("code=unreachable"), "the code distinguishes this from a stopping broker"


def test_groups_are_reset(broker: BrokerProcess, command: Command, topic: str) -> None:
    command("topic", "create", topic, "-p", "2")
    command("record", "produce", topic, "-p", "1", "--format", "raw", typed="".join(f"{n}\n" for n in range(20)))
    reset = ("group", "reset", "billing", topic, "--output", "jsonl", "--to")

    def positions(done: subprocess.CompletedProcess[str]) -> list[tuple[Any, Any, Any]]:
        return [(row["position"], row["new_position"], row["lag_records"]) for row in objects(done.stdout)]

    def lag() -> Any:
        groups = objects(command("group", "list", "--output", "jsonl").stdout)
        return [group["lag_records"] for group in groups if group["topic"] == topic]

    would = command(*reset, "latest", "--dry-run")
    assert positions(would) == [(None, 0, 0), (None, 20, 0)]
    assert would.stderr == f"would reset group=billing topic={topic} partitions=2 new_groups=billing\n"
    assert lag() == []
    moved = command(*reset, "15", "-p", "1")
    assert positions(moved) == [(None, 15, 5)]
    assert moved.stderr == f"reset group=billing topic={topic} partitions=1 new_groups=billing\n"
    assert positions(command(*reset, "99", "-p", "1")) == [(15, 20, 0)]
    assert positions(command(*reset, "earliest")) == [(None, 0, 0), (20, 0, 20)]
    assert lag() == [20]
    assert "option=--to got='soon'" in command(*reset, "soon", code=1).stderr
    assert "code=topic_missing" in command("group", "reset", "g", f"{topic}-none", "--to", "latest", code=1).stderr

    async def joined() -> None:
        client = await connect(broker.url("polywire"))
        assert isinstance(client, PolywireClient)
        await client.join("billing", topic, "m")
        refused = await asyncio.to_thread(command, *reset, "latest", code=1)
        assert "group has members (stop them first) group='billing' members=1 code=group_not_empty" in refused.stderr
        await client.close()

    asyncio.run(joined())


def test_partitions_without_a_commit_have_no_lag(broker: BrokerProcess, command: Command, topic: str) -> None:
    command("topic", "create", topic, "-p", "2")
    for partition in ("0", "1"):
        command("record", "produce", topic, "-p", partition, "--format", "raw", typed="a\nb\n")
    command("group", "reset", "half", topic, "--to", "1", "-p", "0")
    rows = objects(command("group", "describe", "half", "--output", "jsonl").stdout)
    assert [(row["position"], row["lag_records"]) for row in rows if row["topic"] == topic] == [(1, 1), (None, None)]


def test_a_port_in_use_is_reported_with_a_suggestion(broker: BrokerProcess, tmp_path: Path) -> None:
    taken = broker.url("polywire").rpartition("/")[2]
    words = ["serve", "--data-dir", str(tmp_path / "other"), "--polywire", taken]
    off = [word for wire in ("flux", "cursus", "iggy", "kafka", "kafka07") for word in (f"--{wire}", "off")]
    refused = Command("")(*words, *off, code=1)
    assert f"choose another address with --polywire HOST:PORT) listener=polywire address={taken}" in refused.stderr


def test_the_any_port_detects_protocols(broker: BrokerProcess, topic: str) -> None:
    host, port = broker.addresses["any"]

    async def write_and_read() -> list[bytes | None]:
        writer, reader = await connect(f"flux://{host}:{port}"), await connect(f"polywire://{host}:{port}")
        place = (await writer.produce(topic, [Record(b"over-flux", b"k")]))[0]
        found = await reader.fetch(topic, place.partition, place.offset)
        await writer.close()
        await reader.close()
        return [record.value for record in found]

    assert asyncio.run(write_and_read()) == [b"over-flux"]


def test_sigterm_loses_no_acknowledged_record(tmp_path: Path, topic: str) -> None:
    with BrokerProcess(tmp_path / "data") as own:
        acknowledged = asyncio.run(_stop_while_producing(own, topic))
        own.start()
        stored = values(Command(own.url("polywire"))("record", "consume", topic).stdout)
    assert acknowledged
    assert stored[: len(acknowledged)] == acknowledged
    assert len(stored) - len(acknowledged) in (0, 1), "only the request in flight is in doubt"


async def _stop_while_producing(own: BrokerProcess, topic: str) -> list[str]:
    """Produce records one after the other while the broker stops; return the acknowledged values."""
    client = await connect(own.url("polywire"))
    acknowledged: list[str] = []

    async def produce() -> None:
        while True:
            value = str(len(acknowledged))
            await client.produce(topic, [Record(value.encode(), b"k")])
            acknowledged.append(value)
            if len(acknowledged) == 20:
                well_under_way.set()

    well_under_way = asyncio.Event()
    producing = asyncio.ensure_future(produce())
    await well_under_way.wait()
    assert await asyncio.to_thread(own.stop) == 0, own.log_text()
    with pytest.raises(Unavailable):
        await producing
    await client.close()
    return acknowledged
