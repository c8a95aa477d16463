"""Users are changed over several processes, one of which is killed. Every process agrees with every response."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from base64 import b64encode
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.crash.test_processes import has_another, pid_of

PROCESSES: Final = 2
KILLS: Final = 4
WORKERS: Final = 3
LOOKS: Final = 3  # connections after each change; each reaches either process
BETWEEN_S: Final = 1.0
WAIT_S: Final = 90.0

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")


class Asked(Exception):
    """A request without a response, or one that must be repeated."""


def ask(broker: BrokerProcess, user: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request over a new connection. Raises Asked if its outcome is unknown."""
    headers = {
        "Authorization": "Basic " + b64encode(user.encode()).decode(),
        "X-Polywire": "1",
        "Content-Type": "application/json",
    }
    try:
        with closing(http.client.HTTPConnection(*broker.addresses["http"], timeout=30)) as connection:
            connection.request(method, f"/api/v1{path}", None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise Asked(str(error)) from None
    if status >= 500 or status == 429:
        raise Asked(text.decode())
    return status, json.loads(text)


class Worker(threading.Thread):
    """Creates, changes and deletes one user, and looks at it over other connections after each response.

    Attributes:
        passwords: those that the user may have; None if it may not exist.
    """

    def __init__(self, broker: BrokerProcess, name: str) -> None:
        super().__init__()
        self.broker = broker
        self.name = name
        self.passwords: set[str | None] = {None}
        self.changes = 0
        self.is_running = True
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while self.is_running:
                self.change()
        except BaseException as failure:  # it is raised in the main thread
            self.failure = failure

    def change(self) -> None:
        """Make one change, and check it if there was a response."""
        number = self.changes = self.changes + 1
        new: str | None = f"secret-{number}"
        path = f"/users/{self.name}"
        try:
            if self.passwords == {None}:
                body = {"password": new, "permissions": ["consume"]}
                status, _ = ask(self.broker, "alice:wonderland", "POST", path, body)
            elif number % 3 or None in self.passwords:
                status, _ = ask(self.broker, "alice:wonderland", "POST", f"{path}/password", {"password": new})
            else:
                new = None
                status, _ = ask(self.broker, "alice:wonderland", "DELETE", path)
        except Asked:
            self.passwords.add(new)
            time.sleep(2.0)  # another process may still execute it, and later than the next request
            return
        if len(self.passwords) == 1:
            assert status == 200, (self.name, self.passwords, status)
        if status == 200:
            self.passwords = {new}
        elif status == 409:  # it exists after all
            self.passwords.discard(None)
        elif status == 404:
            self.passwords = {None}
        else:
            raise AssertionError((self.name, status))
        if len(self.passwords) == 1:
            self.look()

    def look(self) -> None:
        """Check that every process knows the user as it is."""
        [password] = self.passwords
        for _ in range(LOOKS):
            with suppress(Asked):
                status, found = ask(self.broker, "alice:wonderland", "GET", f"/users/{self.name}")
                assert status == (404 if password is None else 200), (self.name, password, found)
                if password is not None:
                    status, found = ask(self.broker, f"{self.name}:{password}", "GET", "/self")
                    assert status == 200, (self.name, password, found)


def test_users_change_while_processes_are_killed(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "all")
    data = tmp_path / "data"
    draw = random.Random(11)
    with BrokerProcess(data, "--processes", "2", "--users", str(users), wires=("iggy", "http")) as broker:
        workers = [Worker(broker, f"user-{number}") for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        try:
            for kill in range(KILLS):
                shard = kill % PROCESSES
                time.sleep(draw.uniform(0.2, BETWEEN_S))
                victim = pid_of(data, shard)
                os.kill(victim, signal.SIGKILL)
                _wait_for(lambda shard=shard, victim=victim: has_another(data, shard, victim))
                _wait_for(lambda: _is_ready(broker))
        finally:
            for worker in workers:
                worker.is_running = False
            for worker in workers:
                worker.join(WAIT_S)
        for worker in workers:
            if worker.failure is not None:
                raise worker.failure
            assert worker.changes > KILLS
        before = _lists(broker)
        assert len(before) == 1, "all processes have the same users"
        broker.kill()
        broker.start()
        assert _lists(broker) == before


def _wait_for(is_so: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def _is_ready(broker: BrokerProcess) -> bool:
    """Return whether all processes respond."""
    with suppress(Asked):
        return ask(broker, "alice:wonderland", "GET", "/topics")[0] == 200
    return False


def _lists(broker: BrokerProcess) -> set[str]:
    """Return the lists of users that many connections get."""
    return {json.dumps(ask(broker, "alice:wonderland", "GET", "/users")[1]) for _ in range(20)}


def test_a_takeover_of_the_first_shard_keeps_the_users(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "all")
    url = f"file://{tmp_path / 'bucket'}"
    options = "--bucket", url, "--users", str(users)
    wires = ("iggy", "http")
    one = BrokerProcess(tmp_path / "one", *options, "--node", "one", "--processes", "2", wires=wires)
    with one, BrokerProcess(tmp_path / "two", *options, "--node", "two", wires=wires) as two:
        for number in range(3):
            body = {"password": "secret", "permissions": ["consume"]}
            assert ask(two, "alice:wonderland", "POST", f"/users/user-{number}", body)[0] == 200
        assert ask(one, "alice:wonderland", "DELETE", "/users/user-0")[0] == 200
        assert ask(one, "user-1:secret", "POST", "/tokens/t", {})[0] == 200
        before = _lists(one)
        assert len(before) == 1
        one.kill()
        _wait_for(lambda: _is_ready(two))
        assert _lists(two) == before
        assert ask(two, "user-1:secret", "GET", "/self")[0] == 200
        assert ask(two, "alice:wonderland", "DELETE", "/users/user-2")[0] == 200
        one.start()
        _wait_for(lambda: _is_ready(one))
        for broker in (one, two):
            [found] = _lists(broker)
            assert [user["name"] for user in json.loads(found)["users"]] == ["alice", "user-1"]
