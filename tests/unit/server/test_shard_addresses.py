"""Where the processes of a machine are reached by other machines."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from polywire.errors import Invalid
from polywire.protocols.runtime.shards import KEY_BYTES
from polywire.server.config import WIRES, Address, ServeConfig
from polywire.server.listener import INSIDE
from polywire.server.processes import PORTS_EACH, Parent, _check_inside, _reached

SERVED = {"flux": Address("127.0.0.1", 9092), "polywire": Address("10.0.0.7", 9555)}


def test_the_system_chooses_ports_where_nobody_does() -> None:
    found = _reached(ServeConfig(), 3, SERVED)
    assert found == {
        "flux": Address("127.0.0.1", 0),
        "polywire": Address("10.0.0.7", 0),
        INSIDE: Address("10.0.0.7", 0),
    }


def test_no_two_processes_have_a_port() -> None:
    names = [name + end for name in (*WIRES, "any", "http") for end in ("", "-tls")]
    served = {name: Address("127.0.0.1", 1) for name in names}
    ports = [at.port for shard in range(64) for at in _reached(ServeConfig(shard_port=9600), shard, served).values()]
    assert len(set(ports)) == len(ports) == 64 * (len(names) + 1)
    assert min(ports) == 9600
    assert len(names) + 1 <= PORTS_EACH


def test_logins_do_not_leave_the_machine_in_the_clear_unasked() -> None:
    users = ServeConfig(users=Path("users.toml"))
    with pytest.raises(Invalid, match="without TLS so far"):
        _check_inside(users, SERVED)
    _check_inside(users, {"polywire": Address("127.0.0.1", 9555)})
    _check_inside(ServeConfig(users=Path("users.toml"), insecure=True), SERVED)
    _check_inside(ServeConfig(), SERVED)


def _check_taken(at: Address) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((at.host, at.port))


def test_processes_of_a_directory_are_reached_beside_the_port_that_all_share() -> None:
    config = ServeConfig(kafka="127.0.0.1:0", any_wire="127.0.0.1:0", flux="127.0.0.1:0", processes=2)
    parent = Parent(config, bytes(KEY_BYTES))
    try:
        assert [set(own) for own in parent._own] == [{"kafka", "any"}] * 2, "of the others nobody is sent anywhere"
        assert len({at.port for own in parent._own for at in own.values()}) == 4
        for at in (at for own in parent._own for at in own.values()):
            _check_taken(at)
    finally:
        parent.close()


def test_a_port_that_is_taken_is_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        parent = Parent(ServeConfig(kafka="127.0.0.1:0", flux="off", processes=2), bytes(KEY_BYTES))
        try:
            near = parent._kept_near("kafka", Address("127.0.0.1", port - 100), 100)
            assert near.port != port
            assert parent._kept_near("kafka", Address("127.0.0.1", 65_500), 100).port > 0
        finally:
            parent.close()
