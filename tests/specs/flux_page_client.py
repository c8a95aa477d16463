"""A small FLUX client written from the protocol's pages: it produces and consumes through kills of the broker.

Requests in flight when the connection ends are repeated, so a record may be duplicated, but is never lost once it was acknowledged.
Values contain no commas, with which the page joins records.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

WAIT_S = 60.0  # for a broker that is restarted
PAUSE_S = 0.02


class Refused(Exception):
    """An ERR response."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Client:
    """One connection, reopened when it ends; one request at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._number = 0
        self._socket: socket.socket | None = None
        self._rest = b""
        self.reopened = -1

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b""

    def ask(self, command: str, *arguments: object) -> dict[str, str]:
        """Return the fields of an OK response. Raises Refused."""
        end = time.monotonic() + WAIT_S
        while True:
            try:
                return self._ask(command, *arguments)
            except OSError:
                self.close()
                if time.monotonic() > end:
                    raise
                time.sleep(PAUSE_S)

    def _ask(self, command: str, *arguments: object) -> dict[str, str]:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, WAIT_S)
            self.reopened += 1
        self._number += 1
        line = f"V1|{self._number}|{command}|{' '.join(map(str, arguments))}\n"
        self._socket.sendall(line.encode())
        version, number, status, *rest = self._line().split("|", 3)
        assert (version, number) == ("V1", str(self._number)), "responses arrive in the order of requests"
        if status == "ERR":
            code, _, message = "|".join(rest).partition("|")
            raise Refused(code, message)
        assert status == "OK"
        return dict(fields("|".join(rest)))

    def _line(self) -> str:
        assert self._socket is not None
        while b"\n" not in self._rest:
            part = self._socket.recv(1 << 16)
            if not part:
                raise ConnectionError("the broker closed the connection")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def produce(self, topic: str, key: str, value: str, acks: str = "1") -> tuple[int, int]:
        """Return partition and offset of an acknowledged record."""
        reported = self.ask("PRODUCE", topic, f"{key}:{value}", f"acks={acks}")
        return int(reported["partition"]), int(reported["offset"])

    def consume(self, topic: str, partition: int, offset: int) -> list[tuple[int, str]]:
        """Return the committed records from an offset on."""
        reported = self.ask("CONSUME", topic, partition, offset)["messages"]
        records = [record.partition(":") for record in reported.split(",") if record]
        return [(int(number), value) for number, _, value in records]


def fields(payload: str) -> Iterator[tuple[str, str]]:
    """Parse ``key=value`` fields separated by spaces; a list in brackets may contain spaces."""
    while payload:
        name, _, payload = payload.partition("=")
        value, _, payload = payload.partition("] " if payload.startswith("[") else " ")
        yield name, value


class Consumer:
    """A member of a group."""

    def __init__(self, client: Client, group: str, topic: str, name: str, assignor: str = "round_robin") -> None:
        self._client = client
        self._who = (group, topic, name)
        self._assignor = assignor
        self.generation = 0
        self.partitions: list[int] = []
        self.join()

    def join(self) -> None:
        """Become a member, or learn what changed."""
        reported = self._client.ask("JOIN", *self._who, f"assignor={self._assignor}")
        self.generation = int(reported["generation"])
        self.partitions = [int(number) for number in reported["assigned"].strip("[]").split()]

    def leave(self) -> None:
        self._client.ask("LEAVE", *self._who, self.generation)

    def poll(self, handle: Callable[[int, int, str], None]) -> int:
        """Handle new records of this member's partitions, then commit; return their number.

        A removed member rejoins.
        """
        group, topic, _ = self._who
        count = 0
        try:
            self._client.ask("HEARTBEAT", *self._who, self.generation)
            for partition in self.partitions:
                offset = int(self._client.ask("OFFSET", group, topic, partition)["offset"])
                records = self._client.consume(topic, partition, offset)
                for number, value in records:
                    handle(partition, number, value)
                if records:
                    self._client.ask("COMMIT", *self._who, self.generation, partition, records[-1][0] + 1)
                count += len(records)
        except Refused as refused:
            if refused.code != "GENERATION_MISMATCH":
                raise
            self.join()
        return count
