"""The proxy delays bytes, but never changes or repeats them."""

from __future__ import annotations

import random
import socket

import pytest

from tests.histories.faulty_proxy import CHUNK_BYTES, LATE, NONE, SILENT, SLOW, SLOW_BYTES, FaultyProxy


@pytest.mark.parametrize("fault", [SLOW, LATE, SILENT])
def test_a_fault_that_ends_changes_no_byte(fault: str) -> None:
    sent = random.Random(1).randbytes(CHUNK_BYTES)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        FaultyProxy(server.getsockname()[1], random.Random(1)) as proxy,
    ):
        proxy.fault = fault
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            connection, _ = server.accept()
            with connection:
                client.sendall(sent)
                received = connection.recv(SLOW_BYTES, socket.MSG_WAITALL) if fault != SILENT else b""
                proxy.fault = NONE
                received += connection.recv(len(sent) - len(received), socket.MSG_WAITALL)
                client.shutdown(socket.SHUT_WR)
                assert received + connection.recv(1) == sent
