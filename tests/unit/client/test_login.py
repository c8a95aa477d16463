"""User names and passwords in addresses are extracted and never shown."""

from __future__ import annotations

import asyncio

import pytest

from polywire.client.address import PASSWORD_VARIABLE, Login, login_of, split_login
from polywire.client.connect import connect
from polywire.errors import Invalid


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
