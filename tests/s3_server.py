"""A real S3 server for tests: versitygw over a directory, where ``POLYWIRE_S3_SERVER`` names its binary.

``go install github.com/versity/versitygw/cmd/versitygw@v1.8.0`` makes one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

VARIABLE: Final = "POLYWIRE_S3_SERVER"
BUCKET: Final = "test"
START_S: Final = 20.0
_KEY: Final = "polywire-test"


@contextmanager
def s3_server(directory: Path) -> Iterator[Mapping[str, str]]:
    """Serve a directory; yields the environment by which clients find it. Skips where there is no server."""
    binary = os.environ.get(VARIABLE)
    if not binary:
        pytest.skip(f"no S3 server: set {VARIABLE} to the path of a versitygw binary")
    (directory / BUCKET).mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "--port", f"127.0.0.1:{port}", "--access", _KEY, "--secret", _KEY, "--quiet", "posix"]
    server = subprocess.Popen([*command, str(directory)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(port, server)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
    finally:
        server.kill()
        server.wait()


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError("the S3 server does not start")
