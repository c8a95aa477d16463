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
START_S: Final = 60.0
_KEY: Final = "polywire-test"


class S3Server:
    """A server over a directory; it can be stopped and restarted."""

    def __init__(self, binary: str, directory: Path) -> None:
        (directory / BUCKET).mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: Final = int(probe.getsockname()[1])
        command = [binary, "--port", f"127.0.0.1:{self.port}", "--access", _KEY, "--secret", _KEY, "--quiet", "posix"]
        self._command: Final = [*command, str(directory)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment by which clients find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        """Start, and wait until it accepts connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait(self.port, self._process)

    def kill(self) -> None:
        """Kill it like ``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def s3_binary() -> str | None:
    """Return the server's program, if there is one."""
    return os.environ.get(VARIABLE) or None


def bucket_kind() -> str:
    """Return what the bucket of a test is: a server, or a directory if there is none."""
    return "directory" if s3_binary() is None else "versitygw"


@contextmanager
def s3_server(directory: Path) -> Iterator[Mapping[str, str]]:
    """Serve a directory; yield the environment by which clients find it. Skip if there is no server."""
    binary = s3_binary()
    if binary is None:
        pytest.skip(f"no S3 server: set {VARIABLE} to the path of a versitygw binary")
    server = S3Server(binary, directory)
    try:
        server.start()
        yield server.environment
    finally:
        server.kill()


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError("the S3 server does not start")
