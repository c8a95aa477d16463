"""Where the processes of a machine are reached by other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from polywire.errors import Invalid
from polywire.server.config import Address, ServeConfig
from polywire.server.listener import INSIDE
from polywire.server.processes import CARRIED_WIRES, PORTS_EACH, _check_inside, _reached

SERVED = {"flux": Address("127.0.0.1", 9092), "polywire": Address("10.0.0.7", 9555)}


def test_the_system_chooses_ports_where_nobody_does() -> None:
    found = _reached(ServeConfig(), 3, SERVED)
    assert found == {
        "flux": Address("127.0.0.1", 0),
        "polywire": Address("10.0.0.7", 0),
        INSIDE: Address("10.0.0.7", 0),
    }


def test_no_two_processes_have_a_port() -> None:
    names = [name + end for name in (*CARRIED_WIRES, "any", "http") for end in ("", "-tls")]
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
