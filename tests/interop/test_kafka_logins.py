"""Unmodified Kafka clients log in: PLAIN and both SCRAM mechanisms, with and without TLS, and with wrong credentials.

The clients are not part of this project. ``POLYWIRE_KAFKA_CLIENTS`` names an interpreter that has them (spec:
kafka#clients-to-test-with); without it the tests are skipped with a reason.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from polywire.broker.scram import Mechanism
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.certificates import Certificates
from tests.interop.kafka_peer import PEERS

PASSWORD = "pencil, with = and ü"
SECONDS_MAX = 60.0
DRIVER = Path(__file__).parent / "kafka" / "logins.driver"
VARIABLE = "POLYWIRE_KAFKA_CLIENTS"
CLIENTS = tuple(peer.name for peer in PEERS if peer.variable == VARIABLE)
MECHANISMS = ("PLAIN", *(mechanism.value for mechanism in Mechanism))


@pytest.fixture(scope="module")
def interpreter() -> str:
    return os.environ.get(VARIABLE) or pytest.skip(f"{VARIABLE} is not set: clients of Kafka did NOT log in")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if which("openssl") is None:
        pytest.skip("logins under TLS were NOT tried: no openssl to make a certificate with")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("kafka")
    users = directory / "users"
    add_user(users, "alice", PASSWORD, "all", scram=True)
    add_user(users, "bob", PASSWORD, "consume")
    tls = ("--tls-certificate", certificates.path("server"), "--tls-key", certificates.path("server", "key"))
    options = ("--users", str(users), "--kafka-tls", "127.0.0.1:0", *tls)
    with BrokerProcess(directory / "data", *options, wires=["kafka"]) as process:
        yield process


class Login:
    """Runs the driver against a broker."""

    def __init__(self, interpreter: str, broker: BrokerProcess, authority: str) -> None:
        self._interpreter = interpreter
        self._broker = broker
        self._authority = authority

    def __call__(
        self, client: str, mechanism: str, name: str, password: str, topic: str, *, tls: bool = False
    ) -> tuple[str, str]:
        """Return the outcome with what was read, or refused, and the client's output."""
        host, port = self._broker.addresses["kafka-tls" if tls else "kafka"]
        words = [client, f"{host}:{port}", mechanism, name, password, self._authority if tls else "-", topic]
        command = [self._interpreter, str(DRIVER), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        outcome, *reported = json.loads(done.stdout.splitlines()[-1])
        return outcome, reported[0] if outcome == "in" else " ".join([*reported, done.stderr])


@pytest.fixture
def login(interpreter: str, broker: BrokerProcess, certificates: Certificates) -> Login:
    return Login(interpreter, broker, certificates.path("authority"))


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_logs_in_writes_and_reads(login: Login, client: str, mechanism: str, tls: bool) -> None:
    topic = f"{client}.{mechanism}.{tls}"
    assert login(client, mechanism, "alice", PASSWORD, topic, tls=tls) == ("in", f"from {client}")


@pytest.mark.parametrize(
    ("mechanism", "name", "password"),
    [
        ("PLAIN", "unknown", PASSWORD),
        ("SCRAM-SHA-256", "alice", "wrong"),
    ],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reports_wrong_credentials(
    login: Login, client: str, mechanism: str, name: str, password: str
) -> None:
    outcome, said = login(client, mechanism, name, password, "wrong")
    assert outcome == "refused"
    assert "wrong user or password" in said


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_without_permission_to_write_is_refused(login: Login, client: str) -> None:
    outcome, said = login(client, "PLAIN", "bob", PASSWORD, "alices.own")
    assert outcome == "refused"
    assert "uthoriz" in said
