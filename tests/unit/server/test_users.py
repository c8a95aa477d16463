"""The users file."""

from __future__ import annotations

import stat
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from polywire.broker.passwords import check_password
from polywire.broker.permissions import EVERYTHING, Permission, parse_grants
from polywire.broker.scram import Mechanism
from polywire.errors import Conflict, ErrorCode, Invalid, Missing
from polywire.server.config import OFF, ServeConfig
from polywire.server.logins import LOGIN_WIRES
from polywire.server.users import add_user, alter_user, read_users, remove_user
from tests.unit.server.peers import SILENT


def test_a_users_file_is_created_changed_and_read(tmp_path: Path) -> None:
    path = tmp_path / "users"
    add_user(path, "alice", "secret", "all")
    add_user(path, "bob", "hidden", "consume@shop, read_servers")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    alice, bob = read_users(path)
    assert (alice.name, alice.grants) == ("alice", EVERYTHING)
    assert check_password(alice.password_hash, "secret")
    assert (bob.grants.everywhere, bob.grants.streams) == (Permission.READ_SERVERS, {"shop": Permission.CONSUME})
    with pytest.raises(Conflict):
        add_user(path, "alice", "other", "all")
    add_user(path, "alice", "other", "all", replace=True)
    assert [user.name for user in read_users(path)] == ["bob", "alice"]
    remove_user(path, "bob")
    assert [user.name for user in read_users(path)] == ["alice"]
    assert path.read_text().startswith("#"), "the comment stays"
    with pytest.raises(Missing) as caught:
        remove_user(path, "bob")
    assert caught.value.code is ErrorCode.USER_MISSING


def test_a_new_password_leaves_the_permissions(tmp_path: Path) -> None:
    path = tmp_path / "users"
    add_user(path, "alice", "secret", "consume@shop", scram=True)
    add_user(path, "alice", "other", replace=True)
    (alice,) = read_users(path)
    assert alice.grants.streams == {"shop": Permission.CONSUME}
    assert check_password(alice.password_hash, "other")
    assert [verifier.mechanism for verifier in alice.verifiers] == list(Mechanism)
    add_user(path, "alice", "other", "produce@shop", replace=True)
    assert [user.grants.streams for user in read_users(path)] == [{"shop": Permission.PRODUCE}]
    assert add_user(path, "bob", "secret").grants == EVERYTHING


@pytest.mark.parametrize(
    "words",
    [
        "",
        " ",
        ",",
        "consume@sh*",
        "consume@shop/ord*",
        "consume@shop/",
        "consume@/orders",
        "read_servers@shop",
        "consume, manage_users@shop/orders",
    ],
)
def test_permissions_that_grant_nothing_or_too_much_are_refused(tmp_path: Path, words: str) -> None:
    path = tmp_path / "users"
    with pytest.raises(Invalid):
        add_user(path, "alice", "secret", words)
    assert not path.exists()
    add_user(path, "alice", "secret", "consume@shop")
    before = path.read_text()
    with pytest.raises(Invalid):
        alter_user(path, "alice", words)
    assert path.read_text() == before


def test_a_star_in_a_name_is_written_as_an_escape(tmp_path: Path) -> None:
    assert add_user(tmp_path / "users", "alice", "secret", "consume@sh%2A").grants == parse_grants(["consume@sh*"])


def test_a_line_with_only_commas_does_not_grant_everything(tmp_path: Path) -> None:
    path = tmp_path / "users"
    add_user(path, "alice", "secret", "consume")
    path.write_text(path.read_text().replace("consume", ","))
    with pytest.raises(Invalid):
        read_users(path)


def test_permissions_change_without_the_password(tmp_path: Path) -> None:
    path = tmp_path / "users"
    add_user(path, "alice", "secret", "consume@shop", scram=True)
    add_user(path, "bob", "hidden")
    before = path.read_text().splitlines()
    changed = alter_user(path, "alice", "produce@shop, read_servers")
    assert changed.grants.streams == {"shop": Permission.PRODUCE}
    after = path.read_text().splitlines()
    assert [line.split(":")[:2] for line in after] == [line.split(":")[:2] for line in before]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert alter_user(path, "alice", "all").grants == EVERYTHING
    for name, words in (("alise", "consume"), ("alice", "cnsume")):
        with pytest.raises((Missing, Invalid)):
            alter_user(path, name, words)
    assert read_users(path)[0].grants == EVERYTHING


def test_a_user_with_scram_has_verifiers_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "users"
    add_user(path, "alice", "secret", "consume@shop", scram=True)
    add_user(path, "bob", "secret", "all")
    alice, bob = read_users(path)
    assert [verifier.mechanism for verifier in alice.verifiers] == list(Mechanism)
    assert check_password(alice.password_hash, "secret")
    assert alice.grants.streams == {"shop": Permission.CONSUME}
    assert bob.verifiers == ()
    assert "secret" not in path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "$scram-sha-1$16384$c2FsdA==$a2V5$a2V5",
        "$scram-sha-256$16384$c2FsdA==$a2V5$a2V5",
        "$scram-sha-256$16384$$%s$%s",
        "$scram-sha-256$1$c2FsdA==$%s$%s",
        "$scram-sha-256$1000000000$c2FsdA==$%s$%s",
        "$scram-sha-256$-16384$c2FsdA==$%s$%s",
        "$scram-sha-256$x$c2FsdA==$%s$%s",
        "$scram-sha-256$16384$c2FsdA$%s$%s",
        "$scram-sha-256$16384$c2FsdA==$%s",
    ],
)
def test_invalid_verifiers_are_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "users"
    key = b64encode(bytes(32)).decode()
    path.write_text(f"a:$argon2id$v=19$m=19456,t=2,p=1$aaaa$bbbb {text.replace('%s', key)}\n")
    with pytest.raises(Invalid, match="line=1"):
        read_users(path)


@pytest.mark.parametrize("name", ["", "a:b", "#a", " a", "a\nb", "x" * 300])
def test_invalid_user_names_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(Invalid):
        add_user(tmp_path / "users", name, "secret", "all")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice:secret:\n", "line=1"),
        ("# first\n\nalice\n", "line=3"),
        ("a:$argon2id$v=19$m=19456,t=2,p=1$aaaa$bbbb:fly\n", "unknown permission"),
        ("a:$argon2id$v=19$m=19456,t=2,p=1$aaaa$bbbb\n" * 2, "duplicate user"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "users"
    path.write_text(text)
    with pytest.raises(Invalid, match=message):
        read_users(path)


def test_protocols_without_a_login_are_off_by_default_with_users() -> None:
    usual = ServeConfig()
    assert {"flux", "kafka07"} <= set(usual.served(has_users=False, has_anonymous=True))
    assert not {"flux", "kafka07"} & set(usual.served(has_users=True, has_anonymous=False))
    asked = replace(SILENT, flux="127.0.0.1:1", polywire="127.0.0.1:2")
    assert set(asked.served(has_users=True, has_anonymous=True)) == {"flux", "polywire"}
    with pytest.raises(Invalid, match=r"polywire user add anonymous .* or remove --flux"):
        asked.served(has_users=True, has_anonymous=False)
    tls = replace(SILENT, tls={"kafka07": "127.0.0.1:3"}, tls_certificate=Path("c"))
    with pytest.raises(Invalid, match="kafka07 has no login"):
        tls.served(has_users=True, has_anonymous=False)
    certified = replace(tls, tls_client_authority=Path("a"))
    assert set(certified.served(has_users=True, has_anonymous=False)) == {"kafka07-tls"}
    alone = replace(SILENT, kafka07=None)
    with pytest.raises(Invalid, match="all listeners are off"):
        alone.served(has_users=True, has_anonymous=True)


def test_non_loopback_addresses_with_users() -> None:
    users = Path("polywire.users")
    off = replace(SILENT, any_wire="0.0.0.0:1", users=users, tls_certificate=Path("broker.pem"))
    assert set(off.listeners()) == {"any"}
    assert not off.any_plain
    assert off.any_wires() == LOGIN_WIRES
    assert ServeConfig(any_wire="127.0.0.1:1", users=users).any_wires() is None
    assert ServeConfig(any_wire="0.0.0.0:1", insecure=True).any_wires() is None
    local = ServeConfig(any_wire="127.0.0.1:1", users=users)
    assert local.any_wires(has_users=True) == LOGIN_WIRES
    assert replace(local, flux=OFF).any_wires(has_users=True) == LOGIN_WIRES
    assert replace(local, flux="127.0.0.1:2").any_wires(has_users=True) == LOGIN_WIRES | {"flux"}
    with pytest.raises(Invalid, match="this protocol has no login"):
        ServeConfig(flux="0.0.0.0:9092", users=users).listeners()


@pytest.mark.parametrize("wire", sorted(LOGIN_WIRES))
def test_passwords_in_clear_text_need_insecure(wire: str) -> None:
    known = replace(SILENT, users=Path("polywire.users"))
    wide = replace(known, **{wire: "0.0.0.0:1"})  # type: ignore[arg-type]  # each wire is a field of text
    with pytest.raises(Invalid, match=f"--{wire}-tls"):
        wide.listeners()
    assert set(replace(wide, insecure=True).listeners()) == {wire}
    under = replace(known, tls={wire: "0.0.0.0:1"}, tls_certificate=Path("broker.pem"))
    assert set(under.listeners()) == {f"{wire}-tls"}


def test_the_port_for_all_protocols_requires_tls_on_other_addresses() -> None:
    any_wire = replace(SILENT, users=Path("polywire.users"), any_wire="0.0.0.0:1")
    with pytest.raises(Invalid, match="--tls-certificate"):
        any_wire.listeners()
    assert not replace(any_wire, tls_certificate=Path("broker.pem")).any_plain
    assert replace(any_wire, insecure=True).any_plain
    assert replace(any_wire, any_wire="127.0.0.1:1").any_plain
