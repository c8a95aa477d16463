"""The files of FLUX groups while processes are killed: they never lack a group, and the new leader writes them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.protocols.flux.exports import GROUPS, OFFSETS
from tests.broker_process import BrokerProcess
from tests.crash.test_processes import has_another, pid_of

TOPICS: Final = 4
KILLS: Final = 4
WAIT_S: Final = 90.0

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")


def ask(broker: BrokerProcess, *lines: str) -> list[str]:
    """Return the responses to lines over a new connection, without their ids. Raises OSError if it is closed."""
    with socket.create_connection(broker.addresses["flux"], timeout=30) as peer, peer.makefile("rb") as answers:
        peer.sendall("".join(f"V1|1|{line}\n" for line in lines).encode())
        heard = [answers.readline().decode() for _ in lines]
    if not all(answer.endswith("\n") for answer in heard):
        raise ConnectionError("the connection was closed")
    return [answer.rstrip("\n").removeprefix("V1|1|") for answer in heard]


def join(broker: BrokerProcess, group: str, topic: str) -> None:
    """Join a group and commit an offset. Repeats that until it succeeds."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        with suppress(OSError):
            answers = ask(broker, f"PRODUCE|{topic} k:v", f"JOIN|{group} {topic} m", f"COMMIT|{group} {topic} m 2 0 1")
            if all(answer.startswith("OK") for answer in answers[:2]):
                return
        time.sleep(0.05)
    raise AssertionError((group, topic))


def groups_in(directory: Path) -> dict[str, str]:
    """Return the topics of the exported groups. A reader always sees a complete file."""
    try:
        found: dict[str, Any] = json.loads((directory / GROUPS).read_bytes())
    except FileNotFoundError:
        return {}
    return {name: group["topic"] for name, group in found.items()}


def wait_for(is_so: Any, what: object = "") -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.02)


class Reader(threading.Thread):
    """Reads the file of groups. ``missing`` are groups that were missing after they had been exported."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.is_running = True
        self.seen: set[str] = set()
        self.missing: set[str] = set()

    def run(self) -> None:
        while self.is_running:
            found = groups_in(self.directory).keys()
            self.missing |= self.seen - found
            self.seen |= found
            time.sleep(0.005)


def test_exported_groups_remain_while_processes_are_killed(tmp_path: Path) -> None:
    data, draw = tmp_path / "data", random.Random(5)
    expected = {f"g-{number}": f"t-{number}" for number in range(TOPICS)}
    with BrokerProcess(data, "--processes", "2", wires=("flux",)) as broker:
        for group, topic in expected.items():
            join(broker, group, topic)
        wait_for(lambda: groups_in(data) == expected)
        for file in (GROUPS, OFFSETS):
            assert (data / file).stat().st_mode & 0o777 == 0o600
        assert not any((data / "shards").rglob("*.json")), "only the first process writes the files"
        reader = Reader(data)
        reader.start()
        try:
            for kill in range(KILLS):
                shard = kill % 2
                group, topic = f"after-{kill}", f"t-{draw.randrange(TOPICS)}"
                time.sleep(draw.uniform(0, 1))
                victim = pid_of(data, shard)
                os.kill(victim, signal.SIGKILL)
                wait_for(lambda shard=shard, victim=victim: has_another(data, shard, victim))
                join(broker, group, topic)
                expected[group] = topic
                wait_for(lambda: groups_in(data) == expected, (expected, groups_in(data)))
        finally:
            reader.is_running = False
            reader.join(WAIT_S)
        assert not reader.missing
        assert broker.stop() == 0
    assert groups_in(data) == expected
    with BrokerProcess(data, "--processes", "2", "--no-flux-exports", wires=("flux",)):
        assert [(data / file).exists() for file in (GROUPS, OFFSETS)] == [False, False]


def test_the_leader_of_the_first_shard_has_the_files(tmp_path: Path) -> None:
    url, wires = f"file://{tmp_path / 'bucket'}", ("flux",)
    directories = [tmp_path / name for name in ("one", "two")]
    options = "--bucket", url, "--balance-s", "0"
    one = BrokerProcess(directories[0], *options, "--node", "one", "--processes", "2", wires=wires)
    with one, BrokerProcess(directories[1], *options, "--node", "two", wires=wires) as two:
        expected = {f"g-{number}": f"t-{number}" for number in range(TOPICS)}
        for group, topic in expected.items():
            join(two, group, topic)
        assert ask(two, "ADMIN_REGISTER_BROKER|7 host 1")[0].startswith("OK")
        wait_for(lambda: groups_in(directories[0]) == expected)
        assert groups_in(directories[1]) == {}
        one.kill()
        wait_for(lambda: groups_in(directories[1]) == expected)
        assert "brokers=[0 7]" in ask(two, "ADMIN_GET_METADATA|")[0]
        assert groups_in(directories[0]) == expected, "nothing has removed the file of the killed process"
        one.start()
        wait_for(lambda: groups_in(directories[0]) == {})
        join(one, "later", "t-0")
        wait_for(lambda: groups_in(directories[1]) == {**expected, "later": "t-0"})
