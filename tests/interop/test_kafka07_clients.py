"""Unmodified Kafka 0.7 clients against a real broker: each writes and reads 10,000 records, and reads the others'.

The clients are not part of this project. ``POLYWIRE_KAFKA07_CLIENTS`` names a folder that holds them: ``python2`` (an
interpreter), ``py2/samsa``, ``py2/brod``, ``py2/pykafka`` (where each was installed), ``npm/node_modules``, ``ruby3``
(an interpreter, or a script that starts it) and ``kafka-rb`` (its repository). Missing ones are skipped with a reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polywire.client.sync import connect
from tests.three_brokers import Brokers, one_or_three

RECORDS = 10_000
SECONDS_MAX = 50.0
DRIVERS = Path(__file__).parent / "kafka07"


@dataclass(frozen=True)
class Peer:
    """A client: its driver's command line, and its magic values (spec: kafka-0.7#magic-per-record)."""

    name: str
    writes: int
    reads: frozenset[int]

    def command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Return interpreter with driver, and additions to the environment."""
        if self.name in ("samsa", "brod", "pykafka"):
            driver = [str(folder / "python2"), str(DRIVERS / f"{self.name}.py2")]
            return driver, {"PYTHONPATH": str(folder / "py2" / self.name)}
        if self.name == "kafka-rb":
            library = str(folder / "kafka-rb" / "lib")
            return [str(folder / "ruby3"), "-E", "BINARY:BINARY", "-I", library, str(DRIVERS / "kafka-rb.rb")], {}
        node = shutil.which("node") or "node"
        modules = {"NODE_PATH": str(folder / "npm" / "node_modules")}
        return [node, "--no-deprecation", str(DRIVERS / f"{self.name}.js")], modules

    def missing(self, folder: Path) -> str | None:
        """Return what is missing of it."""
        needed = {
            "kafka-rb": [folder / "ruby3", folder / "kafka-rb" / "lib"],
            "npm-kafka": [folder / "npm" / "node_modules" / "kafka"],
            "franz-kafka": [folder / "npm" / "node_modules" / "franz-kafka"],
        }.get(self.name, [folder / "python2", folder / "py2" / self.name])
        absent = [str(path) for path in needed if not path.exists()]
        if self.name in ("npm-kafka", "franz-kafka") and shutil.which("node") is None:
            absent.append("node")
        return ", ".join(absent) or None


PEERS = [
    Peer("samsa", 0, frozenset({0, 1})),
    Peer("brod", 0, frozenset({0})),
    Peer("pykafka", 0, frozenset({0})),
    Peer("npm-kafka", 0, frozenset({0})),
    Peer("franz-kafka", 1, frozenset({1})),
    Peer("kafka-rb", 0, frozenset({0, 1})),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    place = os.environ.get("POLYWIRE_KAFKA07_CLIENTS")
    if place is None:
        pytest.skip("POLYWIRE_KAFKA07_CLIENTS is not set: the Kafka 0.7 wire was NOT tried with any real client")
    return Path(place)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with one_or_three(tmp_path_factory.mktemp("kafka07")) as process:
        yield process


def run(peer: Peer, folder: Path, broker: Brokers, verb: str, topic: str) -> list[str]:
    """Run a client; return its output lines."""
    absent = peer.missing(folder)
    if absent is not None:
        pytest.skip(f"the Kafka 0.7 wire was NOT tried with {peer.name}: missing {absent}")
    host, port = broker.addresses["kafka07"]
    command, variables = peer.command(folder)
    done = subprocess.run(
        [*command, verb, host, str(port), topic, str(RECORDS), "record"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, f"{peer.name} {verb} failed\n{done.stderr[-3000:]}\n{broker.log_text()[-2000:]}"
    return done.stdout.split()


EXPECTED = [f"record-{number:05d}" for number in range(RECORDS)]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_client_writes_and_others_read(peer: Peer, folder: Path, broker: Brokers) -> None:
    topic = f"by-{peer.name}"
    run(peer, folder, broker, "produce", topic)
    assert run(peer, folder, broker, "consume", topic) == EXPECTED
    for reader in PEERS:
        if reader is not peer and peer.writes in reader.reads and reader.missing(folder) is None:
            assert run(reader, folder, broker, "consume", topic) == EXPECTED, reader.name
    for wire in ("kafka07", "polywire"):
        with connect(broker.url(wire)) as client:
            found: list[str] = []
            while len(found) < RECORDS:
                found += [(record.value or b"").decode() for record in client.fetch(topic, 0, len(found))]
            assert found == EXPECTED, wire
