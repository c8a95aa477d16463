"""Addresses: several brokers in one URL share its options, and user names and passwords are extracted and never shown."""

from __future__ import annotations

import asyncio
import socket

import pytest

import polywire
from polywire.client import bulk
from polywire.client.address import PASSWORD_VARIABLE, Login, login_of, split_brokers, split_login
from polywire.client.connect import connect
from polywire.errors import Invalid, Unavailable
from polywire.records.columns import Record
from tests.unit.client.served import Served


@pytest.mark.parametrize(
    ("url", "brokers"),
    [
        ("a:1", ["a:1"]),
        ("kafka://a:1", ["kafka://a:1"]),
        ("a:1,b:2", ["a:1", "b:2"]),
        ("kafka://a:1, b:2", ["kafka://a:1", "kafka://b:2"]),
        ("polywire+tls://a:1,[::1]:2", ["polywire+tls://a:1", "polywire+tls://[::1]:2"]),
        ("polywire://a:1,polywire+tls://b:2", ["polywire://a:1", "polywire+tls://b:2"]),
        ("iggy://me:p,w@a:1,b:2", ["iggy://me:p,w@a:1", "iggy://me:p,w@b:2"]),
        ("kafka://me:x@a:1,b:2?mechanism=PLAIN", ["kafka://me:x@a:1?mechanism=PLAIN", "kafka://me:x@b:2?mechanism=PLAIN"]),
        ("me@a:1,b:2", ["me@a:1", "me@b:2"]),
    ],
)  # fmt: skip
def test_options_of_a_url_apply_to_each_broker(url: str, brokers: list[str]) -> None:
    assert split_brokers(url) == brokers


@pytest.mark.parametrize("url", ["a:1,", "a:1,b", "kafka://a:1,,b:2", "a,b:2", "a:1,b:99999"])
def test_one_broken_address_is_refused_before_any_is_tried(url: str) -> None:
    with pytest.raises(Invalid):
        split_brokers(url)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_an_unreachable_broker_is_skipped(served: Served) -> None:
    url = f"polywire://127.0.0.1:{closed_port()},{served.address}"

    async def produced() -> int:
        client = await connect(url)
        (place,) = await client.produce("t", [Record(b"v", key=b"k")])
        await client.close()
        async with polywire.connect(url) as kept:
            return place.offset + len(await kept.topics())

    assert asyncio.run(produced()) == 1


def test_a_bulk_connection_uses_the_next_broker_at_once(served: Served) -> None:
    connection = bulk.connect(f"127.0.0.1:{closed_port()},{served.address}", reconnect_s=0.0)
    connection.ping()
    served.drop_connections()
    connection.ping()
    connection.close()


def test_no_broker_responds() -> None:
    url = f"127.0.0.1:{closed_port()},127.0.0.1:{closed_port()}"
    with pytest.raises(Unavailable, match=r"no broker responds reasons=.*refused.*; .*refused"):
        bulk.connect(url, reconnect_s=0.0).ping()
    with pytest.raises(Unavailable, match="no broker responds"):
        asyncio.run(connect(url))


@pytest.mark.parametrize(
    ("address", "login", "bare"),
    [
        ("h:1", None, "h:1"),
        ("polywire://h:1", None, "polywire://h:1"),
        ("polywire://a:b@h:1", Login("a", "b"), "polywire://h:1"),
        ("polywire+tls://a:b@[::1]:1", Login("a", "b"), "polywire+tls://[::1]:1"),
        ("a:b:c@h:1", Login("a", "b:c"), "h:1"),
        ("a%40b:c%3A%2F%25@h:1", Login("a@b", "c:/%"), "h:1"),
        ("a:b@c@h:1", Login("a", "b@c"), "h:1"),
    ],
)
def test_addresses_with_a_login(address: str, login: Login | None, bare: str) -> None:
    assert split_login(address) == (login, bare)


def test_a_password_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "outside")
    assert split_login("polywire://a@h:1") == (Login("a", "outside"), "polywire://h:1")
    assert split_login("polywire://a:inside@h:1") == (Login("a", "inside"), "polywire://h:1")
    assert split_login("polywire://h:1") == (None, "polywire://h:1"), "without a user name there is no login"


def test_incomplete_logins_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with pytest.raises(Invalid, match="set the variable POLYWIRE_PASSWORD"):
        split_login("a@h:1")
    with pytest.raises(Invalid, match="password has no user name") as caught:
        split_login(":secret@h:1")
    assert "secret" not in caught.value.message


def test_a_login_is_printed_without_its_password() -> None:
    assert "secret" not in repr(login_of("a", "secret")) + str(login_of("a", "secret"))


@pytest.mark.parametrize("url", ["cursus://a:secret@h:1", "polywire://a:secret@h", "nothing://a:secret@h:1"])
def test_errors_of_addresses_do_not_show_a_password(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        asyncio.run(connect(url))
    assert "secret" not in caught.value.message
