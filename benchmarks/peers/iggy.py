"""Apache Iggy's server over its TCP protocol, version 0.11. Its polls do not wait, so it has no followers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks import iggy_today
from benchmarks.peers.peer import Absent, Address, Follower, Server, find, free_port, server_process
from polywire.protocols.iggy import vsr

_OFF: Final = ("HTTP", "QUIC", "WEBSOCKET", "HEARTBEAT")
"""Other listeners, and the timeout of silent clients: a thousand logins take longer."""


class Iggy:
    """One server with its default settings for storage."""

    name = "Apache Iggy"
    pushes = False

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer: it confirms records in memory, writes them after 1024 records or 1 MiB, and does not sync."""
        port = free_port()
        settings = {f"IGGY_{name}_ENABLED": "false" for name in _OFF}
        settings |= {"IGGY_TCP_ADDRESS": f"127.0.0.1:{port}", "IGGY_SYSTEM_PATH": str(place / "data")}
        command = [
            find("iggy-server", "https://iggy.apache.org", source="get it from"),
            "--with-default-root-credentials",
        ]
        with server_process(command, port, place, environment=settings) as server:
            try:
                self.producer(server.address, "").close()
            except AssertionError as reason:
                raise Absent(f"iggy-server rejected a login with protocol 0.11: {reason}") from None
            yield server

    def create(self, address: Address, topic: str) -> None:
        """See Peer."""
        iggy_today.create(*address, topic)

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See Peer."""
        return iggy_today.connect(*address)

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer."""
        return iggy_today.send_request(topic, values)

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer: the request number of a response is the number of its records."""
        pending = bytearray()

        def count(received: memoryview) -> int:
            nonlocal pending
            pending += received
            found = at = 0
            while len(pending) - at >= vsr.HEADER_BYTES:
                head = bytes(pending[at : at + vsr.HEADER_BYTES])
                end = at + int.from_bytes(head[48:52], "little")
                if end > len(pending):
                    break
                iggy_today.check(head)
                found += int.from_bytes(head[200:208], "little")
                at = end
            del pending[:at]
            return found

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, Follower]:
        """See Peer. Raises NotImplementedError."""
        raise NotImplementedError
