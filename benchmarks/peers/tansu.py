"""Tansu: a broker in Rust that speaks Kafka's protocol and stores each record as a row of an SQLite file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.kafka import KafkaWire
from benchmarks.peers.peer import Server, find, free_port, server_process


class Tansu(KafkaWire):
    """One broker with its storage engine ``sqlite``."""

    name = "Tansu"
    origin_time_us = 1_700_000_000_000_000  # it cannot read records without one

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer: each batch is one transaction in SQLite's write-ahead log, which is synced at checkpoints only."""
        port = free_port()
        address = f"tcp://127.0.0.1:{port}"
        words = ["broker", "--listener-url", address, "--advertised-listener-url", address]
        words += ["--storage-engine", "sqlite:///tansu.db"]  # in the working directory, which is ``place``
        program = find("tansu", "tansu --features libsql", source="cargo install")
        with server_process([program, *words], port, place, asked=self.ready) as server:
            yield server
