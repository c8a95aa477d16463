"""Logins with a provider's tokens on a real broker: HTTP, Kafka and the polywire protocol, and new keys after SIGHUP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from polywire.client import sync
from polywire.errors import Denied
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess, child_environment
from tests.unit.broker.test_id_tokens import AUDIENCE, ISSUER, KEYS, OTHER, jwk, token


def own(broker: BrokerProcess, bearer: str) -> Any:
    request = urllib.request.Request(f"{broker.url('http')}/api/v1/self", headers={"Authorization": f"Bearer {bearer}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["name"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_tokens_log_in_over_every_protocol_with_a_login(tmp_path: Path) -> None:
    users, keys = tmp_path / "users", tmp_path / "keys.json"
    add_user(users, "alice", "secret", "manage_topics")
    keys.write_text(json.dumps(KEYS))
    provider = ("--oidc-issuer", ISSUER, "--oidc-audience", AUDIENCE, "--oidc-keys", str(keys))
    options = ("--users", str(users), "--processes", "2", *provider)
    with BrokerProcess(tmp_path / "data", *options, wires=["polywire", "kafka", "http"]) as broker:
        assert own(broker, token()) == "alice"
        assert [own(broker, bad) for bad in (token(sub="bob"), token(aud="x"), "a.b.c", "abc")] == [401] * 4
        for wire in ("polywire", "kafka"):
            address = broker.url(wire).replace("://", f"://alice:{token()}@")
            with sync.connect(address) as client:
                client.create_topic(f"from-{wire}", 1)
                assert f"from-{wire}" in [topic.name for topic in client.topics()]
            with pytest.raises(Denied):
                sync.connect(broker.url(wire).replace("://", f"://alice:{token(OTHER)}@")).topics()
        keys.write_text(json.dumps({"keys": [jwk(OTHER, "one")]}))
        os.kill(broker.pid, signal.SIGHUP)
        end = time.monotonic() + 60
        while own(broker, token(OTHER)) != "alice":
            assert time.monotonic() < end, broker.log_text()
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--oidc-issuer", ISSUER], "need an issuer, an audience, and keys"),
        (["--oidc-issuer", ISSUER, "--oidc-audience", "x", "--oidc-keys", "none.json"], "need --users"),
        (
            ["--oidc-issuer", ISSUER, "--oidc-audience", "x", "--oidc-keys", "http://x/keys"],
            "must be a file or an https",
        ),
    ],
)
def test_incomplete_settings_prevent_the_start(tmp_path: Path, options: list[str], message: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "polywire", "serve", "--data-dir", str(tmp_path / "data"), "--http", "off", *options],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode != 0
    assert message in found.stderr
