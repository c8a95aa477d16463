"""Unmodified Kafka clients as processes: their locations, their drivers, and their output.

A missing client is skipped with a reason; a driver never outlives its test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pytest

DRIVERS: Final = Path(__file__).parent / "kafka"
SECONDS_MAX: Final = 90.0  # many run on few processors
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")


@dataclass(frozen=True)
class Peer:
    """A client: the environment variable with its location, its codecs and its abilities."""

    name: str
    variable: str
    codecs: Sequence[str] = CODECS
    static: bool = True
    transactions: bool = True
    moves_positions: bool = True  # in a transaction, without reading as a member
    says_assignments: bool = True
    says_empty: bool = True  # distinguishes null and empty
    idempotent: bool = True
    keeps_generation: bool = False  # a member does not rejoin by itself when its connection breaks
    outlives_kills: bool = True  # the client repeats requests in flight, not its application

    @property
    def here(self) -> bool:
        """Return whether the environment gives its location."""
        return bool(os.environ.get(self.variable))


PEERS: Final = (
    Peer("confluent-kafka", "POLYWIRE_KAFKA_CLIENTS", keeps_generation=True),
    Peer("kafka-python", "POLYWIRE_KAFKA_CLIENTS", keeps_generation=True),
    Peer("aiokafka", "POLYWIRE_KAFKA_CLIENTS", keeps_generation=True),
    Peer(
        "java", "POLYWIRE_KAFKA_JAVA"
    ),  # forgets its topics while no broker responds, and rejoins once it has found them
    Peer("java-old", "POLYWIRE_KAFKA_JAVA_OLD", keeps_generation=True),
    Peer("kafkajs", "POLYWIRE_KAFKA_NODE", codecs=("none", "gzip", "snappy"), static=False),
    Peer("franz-go", "POLYWIRE_KAFKA_GO", moves_positions=False),
    Peer("sarama", "POLYWIRE_KAFKA_GO", outlives_kills=False),
    Peer("sarama-max", "POLYWIRE_KAFKA_GO", outlives_kills=False),
    Peer(
        "kafka-go",
        "POLYWIRE_KAFKA_GO",
        static=False,
        transactions=False,
        says_assignments=False,
        says_empty=False,
        idempotent=False,
    ),
)
NEXT: Final = (Peer("confluent-kafka+consumer", "POLYWIRE_KAFKA_CLIENTS"), Peer("java+consumer", "POLYWIRE_KAFKA_JAVA"))
"""Clients with the newer group protocol, configured to use it."""


class Toolbox:
    """Drivers that are built once: the command line of each client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands: dict[str, list[str]] = {}

    def command(self, peer: Peer) -> list[str]:
        """Return the command line of this client's driver; skip if the client is missing."""
        found = os.environ.get(peer.variable, "")
        if not found:
            pytest.skip(f"{peer.variable} is not set: the Kafka wire was NOT tried with {peer.name}")
        key = f"{peer.variable}={found}"
        if key not in self._commands:
            self._commands[key] = self._built(peer, found)
        return self._commands[key]

    def _built(self, peer: Peer, found: str) -> list[str]:
        if peer.variable == "POLYWIRE_KAFKA_CLIENTS":
            return [found, str(DRIVERS / "clients.driver")]
        if peer.variable == "POLYWIRE_KAFKA_NODE":
            return [
                "env",
                f"NODE_PATH={found}",
                _program("node", peer),
                "--no-deprecation",
                str(DRIVERS / "clients.js"),
            ]
        if peer.variable == "POLYWIRE_KAFKA_GO":
            built = self._folder / "clients"
            sources = sorted(str(source) for source in DRIVERS.glob("*.go"))
            _run([_program("go", peer), "build", "-mod=mod", "-o", str(built), *sources], cwd=found)
            return [str(built)]
        classes = self._folder / peer.name
        _run([_program("javac", peer), "-d", str(classes), "-cp", found, str(DRIVERS / "Clients.java")])
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
        return [_program("java", peer), "-Xmx256m", quiet, "-cp", f"{classes}{os.pathsep}{found}", "Clients"]


def _program(name: str, peer: Peer) -> str:
    return shutil.which(name) or pytest.skip(f"{name} is missing: the Kafka wire was NOT tried with {peer.name}")


def _run(command: list[str], cwd: str | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, f"{command[0]} failed\n{done.stderr[-3000:]}"
    return done.stdout


def drive(toolbox: Toolbox, peer: Peer, *words: str) -> list[list[Any]]:
    """Return the driver's output until it ends."""
    return [json.loads(line) for line in _run([*toolbox.command(peer), peer.name, *words]).splitlines()]


class Member:
    """A driver that is a member of a group until it is stopped, or killed at the end of a ``with``."""

    def __init__(self, toolbox: Toolbox, peer: Peer, address: str, topic: str, group: str, instance: str = "") -> None:
        command = [*toolbox.command(peer), peer.name, "member", address, topic, group, instance]
        self._said: list[list[Any]] = []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Member:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()

    @property
    def assigned(self) -> list[int] | None:
        """Return the partitions of its last assignment; None before the first."""
        return self.assignments[-1] if self.assignments else None

    @property
    def assignments(self) -> list[list[int]]:
        """Return its assignments, in order."""
        return [words[1] for words in self._said if words[0] == "assigned"]

    @property
    def records(self) -> list[tuple[int, int]]:
        """Return partition and offset of each delivered record, in order."""
        return [(words[2], words[3]) for words in self._said if words[0] == "record"]

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """Return the same with topics."""
        return [(words[1], words[2], words[3]) for words in self._said if words[0] == "record"]

    def kill(self) -> None:
        """Kill it: its group notices when its session expires."""
        self._process.kill()

    def stop(self) -> None:
        """Stop it cleanly: a dynamic member leaves its group."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        assert self._process.wait(SECONDS_MAX) == 0

    def _listen(self) -> None:
        self._said.extend(map(json.loads, self._process.stdout or ()))


def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Wait for something that a client does at its own pace."""
    end = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < end, f"did not happen in {SECONDS_MAX} s: {what()}"
        time.sleep(0.05)
