"""``polywire dev`` from a user's view: started, inspected, interrupted."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

from polywire.cli.dev import introduction_of
from polywire.client.connect import connect
from polywire.testing.process import WIRES
from tests.broker_process import child_environment

SECONDS_MAX: Final = 60.0


def test_all_protocols_and_a_topic_with_records(tmp_path: Path) -> None:
    environment = child_environment() | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "polywire", "dev", "--free-ports", "--rate", "50"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, text=True) as running:
        try:
            assert running.stdout is not None
            urls = json.loads(running.stdout.readline())
            assert set(WIRES) <= set(urls)
            assert all(":0" not in url[-2:] for url in urls.values())
            tail = [sys.executable, "-m", "polywire", "record", "tail", "sample", "-n", "1", "-a", urls["polywire"]]
            shown = subprocess.run(
                tail, capture_output=True, timeout=SECONDS_MAX, env=environment, check=True, text=True
            )
            assert json.loads(json.loads(shown.stdout)["value"])["order"] >= 100
            assert asyncio.run(topics(urls["kafka"])) == ["sample"]
            top = [sys.executable, "-m", "polywire", "top", "--once", "--interval", "0.5", "-o", "json"]
            shown = subprocess.run(
                [*top, "--http", urls["http"]],
                capture_output=True,
                timeout=SECONDS_MAX,
                env=environment,
                check=True,
                text=True,
            )
            [sample] = json.loads(shown.stdout)["topics"]
            assert sample["topic"] == "sample"
            assert sample["records_per_s"] > 0
        finally:
            running.send_signal(signal.SIGINT)
            _, reported = running.communicate(timeout=SECONDS_MAX)
    assert running.returncode == 0, reported
    assert "ready topic=sample records=100; try: polywire record tail sample" in reported
    assert "Traceback" not in reported
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_port_in_use_suggests_free_ports(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environment = child_environment() | {"TMPDIR": str(tmp_path), "POLYWIRE_SERVE_FLUX": address}
        command = [sys.executable, "-m", "polywire", "dev"]
        ended = subprocess.run(
            command, capture_output=True, env=environment, timeout=SECONDS_MAX, check=False, text=True
        )
    assert ended.returncode == 1
    assert address in ended.stderr
    assert ended.stderr.endswith("if the ports are in use, run: polywire dev --free-ports\n")


def test_a_terminal_shows_where_the_listeners_are() -> None:
    shown = introduction_of({"http": "http://h:1", "kafka": "kafka://k:2"})
    assert shown.splitlines()[-2:] == ["  kafka     kafka://k:2", "  http      http://h:1"]


async def topics(url: str) -> list[str]:
    client = await connect(url)
    found = [topic.name for topic in await client.topics()]
    await client.close()
    return found
