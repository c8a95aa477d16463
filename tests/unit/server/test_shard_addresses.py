"""Addresses at which other machines reach the processes of a machine."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from polywire.errors import Invalid
from polywire.protocols.runtime.shards import KEY_BYTES
from polywire.server.config import WIRES, Address, ServeConfig
from polywire.server.listener import INSIDE, Listener, Server
from polywire.server.placement import Board, HashedNames
from polywire.server.processes import PORTS_EACH, Parent, _check_inside, _reached
from polywire.server.shard import Shard

SERVED = {"flux": Address("127.0.0.1", 9092), "polywire": Address("10.0.0.7", 9555)}


def test_the_system_chooses_ports_by_default() -> None:
    found = _reached(ServeConfig(), 3, SERVED)
    assert found == {
        "flux": Address("127.0.0.1", 0),
        "polywire": Address("10.0.0.7", 0),
        INSIDE: Address("10.0.0.7", 0),
    }


def test_processes_have_distinct_ports() -> None:
    names = [name + end for name in (*WIRES, "any", "http") for end in ("", "-tls")]
    served = {name: Address("127.0.0.1", 1) for name in names}
    ports = [at.port for shard in range(64) for at in _reached(ServeConfig(shard_port=9600), shard, served).values()]
    assert len(set(ports)) == len(ports) == 64 * (len(names) + 1)
    assert min(ports) == 9600
    assert len(names) + 1 <= PORTS_EACH


def test_machines_do_not_send_passwords_in_clear_text_by_default() -> None:
    users = ServeConfig(users=Path("users.toml"))
    with pytest.raises(Invalid, match="in clear text"):
        _check_inside(users, SERVED)
    _check_inside(users, {"polywire": Address("127.0.0.1", 9555)})
    _check_inside(ServeConfig(users=Path("users.toml"), insecure=True), SERVED)
    _check_inside(ServeConfig(), SERVED)


def test_links_with_tls_use_a_reachable_host() -> None:
    """Plain listeners are often off beyond this machine, and those with TLS on."""
    here, plain, secure = Address("127.0.0.1", 1), Address("10.0.0.7", 2), Address("10.0.0.8", 3)
    with_tls = ServeConfig(tls_machine_authority=Path("a"), tls_certificate=Path("b"))
    for served, host in (
        ({"polywire": here, "iggy": plain, "polywire-tls": secure}, secure.host),
        ({"polywire": here, "iggy": plain}, plain.host),
        ({"polywire": plain, "polywire-tls": secure}, plain.host),
        ({"polywire": here, "iggy": here}, here.host),
    ):
        assert _reached(with_tls, 1, served)[INSIDE].host == host
        assert _reached(ServeConfig(), 1, served)[INSIDE].host == served["polywire"].host


def test_links_with_tls_need_a_certificate_and_a_bucket() -> None:
    authority = Path("authority.pem")
    with pytest.raises(Invalid, match="--tls-certificate"):
        ServeConfig(tls_machine_authority=authority, bucket="file:///bucket").listeners()
    with pytest.raises(Invalid, match="--bucket"):
        ServeConfig(tls_machine_authority=authority, tls_certificate=authority).listeners()
    assert ServeConfig(tls_machine_authority=authority, tls_certificate=authority, bucket="file:///bucket").listeners()


def _check_taken(at: Address) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((at.host, at.port))


def test_processes_of_a_directory_have_ports_near_the_shared_one() -> None:
    config = ServeConfig(kafka="127.0.0.1:0", any_wire="127.0.0.1:0", flux="127.0.0.1:0", processes=2)
    parent = Parent(config, bytes(KEY_BYTES))
    try:
        assert [set(own) for own in parent._own] == [{"kafka", "any"}] * 2, "clients are not redirected to the others"
        assert len({at.port for own in parent._own for at in own.values()}) == 4
        for at in (at for own in parent._own for at in own.values()):
            _check_taken(at)
    finally:
        parent.close()


def free_ports(count: int) -> int:
    """Return the first of so many free ports, below the ephemeral range."""
    return next(first for first in range(20_000, 32_000, count) if all(map(is_free, range(first, first + count))))


def is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


def test_shard_port_applies_to_cursus_clients() -> None:
    first = free_ports(2 * PORTS_EACH)
    config = ServeConfig(kafka="127.0.0.1:0", any_wire="127.0.0.1:0", cursus="127.0.0.1:0", flux="off", processes=2)
    parent = Parent(replace(config, shard_port=first), bytes(KEY_BYTES))
    try:
        assert [[*own] for own in parent._own] == [["kafka", "any", "cursus"]] * 2
        assert parent._own[1]["cursus"].port == first + PORTS_EACH + 2
    finally:
        parent.close()


def shard_of(*, host: str, is_advertised: bool) -> Shard:
    """Return a shard that shares ports 9000 and 9999, and has 9101 and 9102 for itself."""

    def listeners(**ports: int) -> list[Listener]:
        return [Listener(name, Address("0.0.0.0", port), cast(Server, None)) for name, port in ports.items()]

    shard = Shard(0, Board(2), HashedNames(0, 2), [], cast(socket.socket, None), bytes(KEY_BYTES))
    shard.opened(
        listeners(cursus=9000, any=9999), listeners(cursus=9101, any=9102), host=host, is_advertised=is_advertised
    )
    return shard


@pytest.mark.parametrize(("host", "reported"), [("", "10.0.0.7"), ("one.example", "one.example")])
def test_clients_of_one_process_get_the_shared_address(host: str, reported: str) -> None:
    shard = shard_of(host=host, is_advertised=False)
    assert shard.lasting(("10.0.0.7", 9101)) == (reported, 9000)
    assert shard.lasting(("10.0.0.7", 9102)) == (reported, 9999)
    for at in (("10.0.0.7", 9000), ("10.0.0.7", 4711)):
        assert shard.lasting(at) == at
        assert shard.alone(at) == at


def test_a_single_process_is_advertised_only_if_its_port_is_stable() -> None:
    shard = shard_of(host="", is_advertised=True)
    assert shard.alone(("10.0.0.7", 9000)) == ("10.0.0.7", 9101)
    assert shard.alone(("10.0.0.7", 9999)) == ("10.0.0.7", 9102)
    assert shard.alone(("10.0.0.7", 4711)) == ("10.0.0.7", 4711)


def test_a_port_in_use_is_replaced_by_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        parent = Parent(ServeConfig(kafka="127.0.0.1:0", flux="off", processes=2), bytes(KEY_BYTES))
        try:
            near = parent._reserved_near("kafka", Address("127.0.0.1", port - 100), 100)
            assert near.port != port
            assert parent._reserved_near("kafka", Address("127.0.0.1", 65_500), 100).port > 0
        finally:
            parent.close()
